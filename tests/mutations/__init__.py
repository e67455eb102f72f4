"""Each trap of the kernels, put back into a copy of the code: the test that names it has to fail."""
