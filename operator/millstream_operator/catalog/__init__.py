"""Catalogue: data of GPUs and shapes of models. No decisions."""
