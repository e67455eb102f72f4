"""Make a quantized checkpoint from a 16-bit one, layer by layer, calibrated on texts of the user's own."""
