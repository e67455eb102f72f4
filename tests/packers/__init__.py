"""Other packers, in environments of their own, against this runtime: `make packers`, `make packed-checkpoints`."""
