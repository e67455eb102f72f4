"""Tile sizes, warps and stages of the linear kernels: one committed table per architecture, what may be in it."""
