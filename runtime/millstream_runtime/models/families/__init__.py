"""Model families: one file per architecture, over shared layers."""
