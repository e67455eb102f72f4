"""Fixtures of the soak's own tests."""

from tests.support.engines import one_thread

__all__ = ["one_thread"]
