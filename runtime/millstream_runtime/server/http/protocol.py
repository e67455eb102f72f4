"""uvicorn's protocol on httptools (llhttp, in C), with three additions: a cap on headers, which uvicorn's own h11
protocol has, one packet for a short answer (`coalescing_transport`), and a callback on disconnect (`disconnect`).

Neither llhttp nor uvicorn limits headers: an endless header, thousands of headers, or trailers behind a chunked body
would fill the memory of the process before any route saw the request.

    received bytes - bytes of the body = request line, headers, chunk sizes, trailers ≤ MAX_HEAD_BYTES + the chunks' own
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream_runtime.server.http.coalescing_transport import CoalescingTransport
from millstream_runtime.server.http.disconnect import EXTENSION, DisconnectSignal

MAX_HEAD_BYTES = 64 << 10  # h11's, so what was accepted before still is
CHUNK_OVERHEAD = 8  # a chunk of one byte has five more of framing; no well-behaved client sends many of those


class CappedHttpProtocol(HttpToolsProtocol):
    """Answers 400 and closes a connection that sends more than the cap outside its body."""

    transport: CoalescingTransport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = CoalescingTransport(transport, self.loop)
        self._disconnect_signal = DisconnectSignal(self.flow.resume_reading)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes > MAX_HEAD_BYTES + CHUNK_OVERHEAD * self._body_bytes:
            self.send_400_response(f"The request has more than {MAX_HEAD_BYTES} bytes of headers.")
            return
        self._head_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        # The rest of the piece that begins the message is not counted: at most one read of the socket.
        self._head_bytes = self._body_bytes = 0
        super().on_message_begin()
        self.scope["extensions"] = {
            EXTENSION: {"disconnect_signal": self._disconnect_signal}
        }  # ASGI: one dict per request

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        self.transport.expect_header()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disconnect_signal.notify()
