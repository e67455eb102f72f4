"""Kernels that read and write every number once: norms, activations, rotations, and their quantized outputs."""
