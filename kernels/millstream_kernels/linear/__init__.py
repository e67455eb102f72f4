"""Products of activations and quantized weights: the layouts that weights are repacked to, and the kernels."""
