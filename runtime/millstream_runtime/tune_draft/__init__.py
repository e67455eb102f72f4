"""Tune a draft model on its target's own answers to the prompts of a deployment."""
