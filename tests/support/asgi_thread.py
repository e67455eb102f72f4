"""Any ASGI application behind the server's own HTTP protocol, on a loopback port, in a thread of the test process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from millstream_runtime.server.http.connection_limits import ConnectionLimits
from millstream_runtime.server.http.connection_table import ConnectionTable
from millstream_runtime.server.http.protocol import CappedHttpProtocol
from millstream_runtime.server.http.sockets import bind
from tests.support.server_thread import PATIENCE_SECONDS, wait_for


class AsgiThread:
    """`port` takes connections until the block of `serving_app` ends."""

    def __init__(self, app: ASGIApp, keep_alive_seconds: int) -> None:
        self._listener = bind("127.0.0.1", 0)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # connections inherit it
        self.port: int = self._listener.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=partial(CappedHttpProtocol, table=ConnectionTable(ConnectionLimits())),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=keep_alive_seconds,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def connect(self, receive_buffer_bytes: int | None = None) -> socket.socket:
        """A client's connection; `receive_buffer_bytes`: what the kernel keeps for a client that does not read."""
        link = socket.socket()
        if receive_buffer_bytes is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        link.settimeout(PATIENCE_SECONDS)
        link.connect(("127.0.0.1", self.port))
        return link

    @property
    def connections(self) -> list[CappedHttpProtocol]:
        """As the server sees them."""
        return [one for one in self._server.server_state.connections if isinstance(one, CappedHttpProtocol)]

    def start(self) -> None:
        self._thread.start()
        wait_for(lambda: self._server.started, "the server to listen")

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"


@contextmanager
def serving_app(app: ASGIApp, keep_alive_seconds: int = 60) -> Iterator[AsgiThread]:
    """Serve `app` while the block runs."""
    server = AsgiThread(app, keep_alive_seconds)
    server.start()
    try:
        yield server
    finally:
        server.stop()
