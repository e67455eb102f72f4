"""Kernels: one operation a file, each held to plain mathematics. docs/kernels.md lists them."""
