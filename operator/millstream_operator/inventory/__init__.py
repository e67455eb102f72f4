"""Inventory: the GPUs that exist and those that are free, from nodes and pods or from a command line."""
