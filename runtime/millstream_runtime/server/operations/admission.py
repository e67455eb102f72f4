"""Admission of generations: a bounded queue that a drain closes.

Counted on the event loop, from the moment a request is accepted (before its prompt is tokenised) to its last token,
so the count is exact and `idle` means that no request is waiting for anything.
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
        self._in_flight = 0
        self._last_arrival = float("-inf")
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Hold `count` slots while the block runs.

        Raises:
            ApiError: 503 after `close`, 429 when the queue is full.
        """
        if self._closed:
            raise unavailable("The server is shutting down; try again.", "draining")
        if self._in_flight + count > self._capacity:
            raise ApiError(
                429,
                f"The queue is full ({self._in_flight} requests, at most {self._capacity}); try again later.",
                type_="rate_limit_error",
                code="queue_full",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._in_flight += count
        self._last_arrival = asyncio.get_running_loop().time()
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= count
            if not self._in_flight:
                self._idle.set()

    @property
    def in_flight(self) -> int:
        """Generations that run or wait."""
        return self._in_flight

    @property
    def last_arrival(self) -> float:
        """When the last request was admitted, by the event loop's clock; minus infinity before the first."""
        return self._last_arrival

    def close(self) -> None:
        """Refuse new requests with a 503 from now on; admitted ones continue."""
        self._closed = True

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait for the last generation to end; False after the timeout."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True
