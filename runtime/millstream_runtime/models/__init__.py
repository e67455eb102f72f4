"""Models: one file per family, over shared layers."""
