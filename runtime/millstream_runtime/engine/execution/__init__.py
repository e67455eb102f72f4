"""Execution: one step on the device, eagerly or from CUDA graphs, on one rank or several."""
