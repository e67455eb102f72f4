"""Build the operator and runtime images without a daemon, and push them to a registry."""
