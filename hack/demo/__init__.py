"""`make demo`: from a running cluster to one streamed chat answer. Safe to interrupt and to run again."""
