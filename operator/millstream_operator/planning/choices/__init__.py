"""Choices: which placement, format and drafting method a plan takes. Pure."""
