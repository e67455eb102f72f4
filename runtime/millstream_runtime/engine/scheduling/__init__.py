"""Scheduling: which request computes how many tokens in a step, and which KV blocks it gets. No torch."""
