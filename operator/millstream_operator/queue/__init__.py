"""The work queue: when each key is reconciled next."""
