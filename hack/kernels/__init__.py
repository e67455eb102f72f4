"""What the Triton kernels compile to, without a GPU."""
