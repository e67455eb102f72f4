"""Linear layers on a CPU: packed and half-precision copies of weights, and products in parts."""
