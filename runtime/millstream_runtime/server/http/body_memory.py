"""How much memory request bodies may take together, while they are read and parsed.

The cap on one body is no cap on those of all connections: a client that sends slowly keeps what it has sent until its
time is over. What counts is only what each has beyond LARGE_BODY_BYTES, so small requests are never refused for the
sake of large ones; their sum is bounded by the cap on connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import too_many_large_bodies

CountBytes = Callable[[int], None]
"""Is given the bytes of each further piece of a body. Raises ApiError: 503, there is no room for it."""


class BodyMemory:
    """Of one event loop.

    Attributes:
        used_bytes: that count at present.
    """

    def __init__(self, most_bytes: int) -> None:
        self.used_bytes = 0
        self._most_bytes = most_bytes

    @contextmanager
    def of_one(self) -> Iterator[CountBytes]:
        """A context for one body, whose bytes count until its end."""
        size_bytes = counted_bytes = 0

        def count_bytes(num_bytes: int) -> None:
            nonlocal size_bytes, counted_bytes
            size_bytes += num_bytes
            more_bytes = max(0, size_bytes - limits.LARGE_BODY_BYTES) - counted_bytes
            if self.used_bytes + more_bytes > self._most_bytes:
                raise too_many_large_bodies()
            self.used_bytes += more_bytes
            counted_bytes += more_bytes

        try:
            yield count_bytes
        finally:
            self.used_bytes -= counted_bytes
