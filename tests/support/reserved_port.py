"""A TCP port for a server of another process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that nothing listens on, and that no other process is given meanwhile.

    It stays bound, but not listening. Linux lets a server with SO_REUSEADDR, which asyncio and `create_server` set,
    listen on such a port all the same. A port that is only looked up may be another's when the server comes to use it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
