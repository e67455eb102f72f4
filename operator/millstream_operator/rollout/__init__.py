"""Rollout: which revision runs, and how it reaches the pods."""
