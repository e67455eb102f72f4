"""Medusa heads next to their target: weights, the hidden states that they read, and what they compute."""
