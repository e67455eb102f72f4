"""Products of rows rounded to 8 bits by weights in codes of 4 to 8 bits: the kernel, its weights, and its check."""
