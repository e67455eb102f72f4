"""Fixtures of the tests of quantized formats."""

from __future__ import annotations

from tests.support.engines import one_thread

__all__ = ["one_thread"]
