"""Linear layers on a CPU: second layouts and half-precision copies of weights."""
