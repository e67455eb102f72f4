"""Products by quantized weights on a CPU, which read the packed weight and not a dequantized copy."""
