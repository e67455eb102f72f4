"""Facts: what plans are made from, and how the operator finds it out."""
