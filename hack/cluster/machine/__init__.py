"""The machine that carries the cluster: whether it can, and whether its disk is large enough."""
