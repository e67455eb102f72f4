"""Generators of reference pages in docs/."""
