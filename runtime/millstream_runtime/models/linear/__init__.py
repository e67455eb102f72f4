"""Linear layers: on one rank, and cut for tensor parallelism."""
