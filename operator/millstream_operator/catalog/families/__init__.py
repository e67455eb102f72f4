"""How each family of models counts its parameters: one file a way of being built."""
