"""Queue: when each key is reconciled next."""
