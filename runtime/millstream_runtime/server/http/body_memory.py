"""How much memory request bodies may take together, from their first byte until their prompt is tokenised.

The cap on one body is no cap on those of all connections: a client that sends slowly keeps what it has sent until its
time is over. What counts is only what each has beyond LARGE_BODY_BYTES, so small requests are never refused for the
sake of large ones; their sum is bounded by the cap on connections.

    first byte ── arrives ──▶ whole ── is parsed ── waits for the tokenizer ──▶ released
                  └ after LARGE_BODY_SECONDS it is given up, if another one needs its memory

Or a few clients that send eight megabytes, and then a byte every half a minute, would keep all others out for hours.
A body that has been parsed counts with the bytes it came in: a list of token ids takes up to nine times as many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import late_large_body, too_many_large_bodies

_STATE = "held_body"  # in the state of the request's scope


class BodyMemory:
    """Of one event loop.

    Attributes:
        used_bytes: that count at present.
    """

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self.used_bytes = 0
        self._most_bytes = most_bytes
        self._clock = clock
        self._arriving: dict[HeldBody, float] = {}  # large ones and when they became large; the oldest first

    @contextmanager
    def of_one(self, scope: Scope) -> Iterator[HeldBody]:
        """A context for one request's body, whose bytes count until its end or `release_body`."""
        held = scope["state"][_STATE] = HeldBody(self)
        try:
            yield held
        finally:
            held.release()

    def take(self, held: HeldBody, num_bytes: int) -> None:
        """Count further bytes of a body that arrives.

        Raises:
            ApiError: 503, there is no room for them.
        """
        while self.used_bytes + num_bytes > self._most_bytes:
            late = next((one for one in self._arriving if one is not held), None)
            if late is None or self._clock() - self._arriving[late] < limits.LARGE_BODY_SECONDS:
                raise too_many_large_bodies()
            late.give_up()
        self._arriving.setdefault(held, self._clock())
        self.used_bytes += num_bytes

    def arrived(self, held: HeldBody) -> None:
        """It is not given up for another one any more."""
        self._arriving.pop(held, None)

    def free(self, held: HeldBody, num_bytes: int) -> None:
        """Count that many bytes of it no more."""
        self.arrived(held)
        self.used_bytes -= num_bytes


class HeldBody:
    """The body of one request."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._size_bytes = self._counted_bytes = 0
        self._reader: asyncio.Task[object] | None = None
        self._is_given_up = False

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """A context in which this task reads the body.

        Raises:
            ApiError: 503, its memory was needed for another one.
        """
        self._reader = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_given_up or self._reader is None or self._reader.uncancel():
                raise
            raise late_large_body() from None
        finally:
            self._memory.arrived(self)

    def count(self, num_bytes: int) -> None:
        """Count a further piece.

        Raises:
            ApiError: 503, there is no room for it.
        """
        self._size_bytes += num_bytes
        more_bytes = self._size_bytes - limits.LARGE_BODY_BYTES - self._counted_bytes
        if more_bytes > 0:
            self._memory.take(self, more_bytes)
            self._counted_bytes += more_bytes

    def give_up(self) -> None:
        """End `arriving`, where this is called from another task."""
        self._is_given_up = True
        self.release()
        if self._reader is not None:
            self._reader.cancel()

    def release(self) -> None:
        """Count it no more. Safe to call twice."""
        counted_bytes, self._counted_bytes = self._counted_bytes, 0
        self._memory.free(self, counted_bytes)


def release_body(scope: Scope) -> None:
    """The request's body is not needed any more: its prompt has been tokenised."""
    held: HeldBody = scope["state"][_STATE]
    held.release()
