"""Products by quantized weights on a GPU: by Triton kernels that are compared with the weight, else dequantized."""
