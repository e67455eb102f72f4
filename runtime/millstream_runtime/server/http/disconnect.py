"""A client that hangs up before its answer is complete: noticed at once, so that the engine stops working for it.

ASGI's own way is a task beside every request that waits to receive `http.disconnect`. Here the connection tells it: a
call when it is lost, and nothing at all for the requests that are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

EXTENSION = "millstream.connection"  # ASGI extension, whose one field is the HangUp of the request's connection


class ClientGoneError(Exception):
    """Nobody is left to answer."""


class HangUp:
    """The end of one connection, and who is to hear of it."""

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        """`resume_reading`: a hang-up is seen by reading, which the last piece of a long body may have paused."""
        self._resume_reading = resume_reading
        self._calls: set[Callable[[], None]] = set()
        self._happened = False

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` once when it happens; now if it has."""
        if self._happened:
            on_gone()
            return
        self._calls.add(on_gone)
        self._resume_reading()

    def unwatch(self, on_gone: Callable[[], None]) -> None:
        """Not any more."""
        self._calls.discard(on_gone)

    def mark(self) -> None:
        """The connection is lost."""
        self._happened = True
        while self._calls:
            self._calls.pop()()


@contextmanager
def watching(scope: Scope, on_gone: Callable[[], None]) -> Iterator[None]:
    """While the block runs, call `on_gone` once if the client hangs up. The request's body must have been read."""
    hang_up: HangUp = scope["extensions"][EXTENSION]["hang_up"]
    hang_up.watch(on_gone)
    try:
        yield
    finally:
        hang_up.unwatch(on_gone)
