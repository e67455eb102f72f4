"""Who may start a generation: a bounded queue, and a door that drain closes.

Counted on the event loop, from the moment a request is accepted (before its prompt is tokenised) to its last token,
so the count is exact and `idle` means that nobody is waiting for anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from millstream_runtime.server.http.api_errors import ApiError, unavailable
from millstream_runtime.server.http.limits import RETRY_AFTER_SECONDS


class Admission:
    """`capacity` counts running and queued generations together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._live = 0
        self._last_came = float("-inf")
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places while the block runs.

        Raises:
            ApiError: 503 once the door is closed, 429 when the queue is full.
        """
        if self._closed:
            raise unavailable("The server is shutting down; try again.", "draining")
        if self._live + count > self._capacity:
            raise ApiError(
                429,
                f"The queue is full ({self._live} requests, at most {self._capacity}); try again later.",
                type_="rate_limit_error",
                code="queue_full",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._live += count
        self._last_came = asyncio.get_running_loop().time()
        self._idle.clear()
        try:
            yield
        finally:
            self._live -= count
            if not self._live:
                self._idle.set()

    @property
    def live(self) -> int:
        return self._live

    @property
    def last_came(self) -> float:
        """When the last newcomer got in, by the event loop's clock; minus infinity before the first."""
        return self._last_came

    def close(self) -> None:
        """From now on every newcomer gets a 503; whoever is inside stays."""
        self._closed = True

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """True when the last generation ended in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True
