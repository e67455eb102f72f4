"""Leadership by a Lease: who may write."""
