"""Facts: what plans are made from, read from nodes, pods, inspections and the GPU catalogue."""
