"""How checkpoints store the weights of linear layers: one file per format."""
