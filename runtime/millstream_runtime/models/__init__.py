"""Model families: one file each; shared layers carry the rest."""
