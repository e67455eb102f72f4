"""Client disconnects: noticed at once, so that the engine stops working for a request whose client is gone.

The usual ASGI way is one task per request that waits to receive `http.disconnect`. Here the connection calls back when
it is lost, which costs nothing for requests that are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

EXTENSION = "millstream.connection"  # ASGI extension; its one field is the DisconnectSignal of the connection


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was complete."""


class DisconnectSignal:
    """The end of one connection, and the callbacks that wait for it."""

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        """`resume_reading`: a disconnect is seen by reading, which the last piece of a long body may have paused."""
        self._resume_reading = resume_reading
        self._callbacks: set[Callable[[], None]] = set()
        self._disconnected = False
        self.keep_alive: Callable[[], None] | None = None  # makes the stream that is written send a comment

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` once on disconnect; now if the client has disconnected already."""
        if self._disconnected:
            callback()
            return
        self._callbacks.add(callback)
        self._resume_reading()

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        """Remove `callback`; unknown ones are no error."""
        self._callbacks.discard(callback)

    def notify(self) -> None:
        """Mark the connection as lost and run the callbacks."""
        self._disconnected = True
        while self._callbacks:
            self._callbacks.pop()()


@contextmanager
def on_disconnect(
    scope: Scope, callback: Callable[[], None], keep_alive: Callable[[], None] | None = None
) -> Iterator[None]:
    """Call `callback` once if the client disconnects while the block runs. The request's body must have been read.

    `keep_alive`: makes a stream send a comment, by which a client that has ended its side is asked (`half_close`).
    """
    signal: DisconnectSignal = scope["extensions"][EXTENSION]["disconnect_signal"]
    signal.subscribe(callback)
    signal.keep_alive = keep_alive
    try:
        yield
    finally:
        signal.keep_alive = None
        signal.unsubscribe(callback)
