"""Leadership: leader election by a Lease."""
