"""Mistakes, each made in a copy of the code: a test that the list names has to fail."""
