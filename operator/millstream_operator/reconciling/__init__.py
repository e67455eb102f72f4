"""Reconciling: from the spec and the state of the cluster to the writes that make them agree, and to the status."""
