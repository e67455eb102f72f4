"""The command `millstream`."""

__version__ = "0.2.0"
