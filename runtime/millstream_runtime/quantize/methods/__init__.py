"""How the weights of a layer are rounded: one file per idea."""
