"""A client that has ended its side of the connection: does it wait for its answer, or is it gone?

TCP shows both in the same way, so the client is sent bytes that mean nothing: an interim response before the answer
(RFC 9110, 15.2: a client skips one that it did not expect), a comment in a stream. A machine that has closed the
connection answers them with a reset.

    end of input ─▶ ask ─▶ acknowledged: ask again, later and later
                       └─▶ reset: gone

HTTP/1.0 has no interim response. Such a client counts as gone if its answer does not begin within
`HTTP_1_0_PATIENCE_SECONDS`: proxies that speak HTTP/1.0 close the connection when their own client is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

INTERIM_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_QUESTION_SECONDS = 0.5  # most answers have begun by then, and need no question
SHORTEST_PAUSE_SECONDS = 0.1  # for the reset to come back
LONGEST_PAUSE_SECONDS = 15.0
HTTP_1_0_PATIENCE_SECONDS = 10.0
_TCP_CLOSE = 7  # the kernel's state of a connection that was reset


class HalfClosed:
    """Asks one client, from the end of its input to the end of the connection. Used on the event loop only."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        ask: Callable[[], bool],
        on_gone: Callable[[], None],
        *,
        at_once: bool,
    ) -> None:
        """`ask`: make the server write something; False where nothing may be written. `on_gone`: called once.
        `at_once`: do not wait with the first question: a client that is gone takes from others what it does not need.
        """
        self._transport = transport
        self._loop = loop
        self._ask = ask
        self._on_gone = on_gone
        self._began_at_seconds = loop.time()
        self._pause_seconds = SHORTEST_PAUSE_SECONDS
        self._timer = loop.call_later(0.0 if at_once else FIRST_QUESTION_SECONDS, self._look)

    def close(self) -> None:
        """Ask no more."""
        self._timer.cancel()

    def _look(self) -> None:
        waited_seconds = self._loop.time() - self._began_at_seconds
        if _was_reset(self._transport) or not (self._ask() or waited_seconds < HTTP_1_0_PATIENCE_SECONDS):
            self._on_gone()
            return
        self._timer = self._loop.call_later(self._pause_seconds, self._look)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)


def _was_reset(transport: asyncio.Transport) -> bool:
    """Whether the other machine has answered with a reset; the event loop does not read any more, and cannot see it."""
    link = transport.get_extra_info("socket")
    try:
        return bool(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)
    except (AttributeError, OSError):  # no TCP, or closed by this side
        return False
