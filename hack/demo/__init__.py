"""`make demo`: from a running cluster to a streamed chat answer. Can be interrupted and run again."""
