"""Kernels: one operation a file, each held to a plain torch reference."""
