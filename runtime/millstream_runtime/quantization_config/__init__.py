"""What a config.json says of quantized weights, read without torch: the runtime and the planner refuse alike."""
