"""Probing: boot reports of pods, and the model through its Service."""
