"""Rules that a schema cannot say, each in CEL and in Python; `api/rules.py` puts them together."""
