"""A time limit that is moved often and expires rarely.

A timer per move would leave a cancelled timer in the event loop for every request. Here there is one timer, which
starts itself again when it fires too early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls back once when its time is over. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expired: Callable[[], None]) -> None:
        self._loop = loop
        self._on_expired = on_expired
        self._expires_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._expires_at is not None

    def set(self, seconds: float) -> None:
        """Expire in `seconds`, unless it is set again or cleared before that."""
        self._expires_at = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._expires_at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._expires_at, self._on_timer)

    def clear(self) -> None:
        """Do not expire."""
        self._expires_at = None

    def close(self) -> None:
        """Do not expire, and keep no timer."""
        self.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._expires_at is None:
            return
        if self._expires_at > self._loop.time():
            self._timer = self._loop.call_at(self._expires_at, self._on_timer)
            return
        self._expires_at = None
        self._on_expired()
