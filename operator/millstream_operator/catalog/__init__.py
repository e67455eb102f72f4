"""Facts as data: what GPUs hold, reach and cost, and the shapes of models. No decisions."""
