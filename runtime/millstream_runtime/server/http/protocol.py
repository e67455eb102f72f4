"""uvicorn's protocol on httptools (llhttp, in C), with what it lacks: a cap on headers, which its own on h11 has, one
packet for a short answer (`held_head`), and a word to the request when its client hangs up (`client_gone`).

llhttp keeps no line itself, and neither it nor uvicorn counts: a header that never ends, thousands of them, or trailers
behind a chunked body would fill the memory of the process before any route saw the request.

    received bytes - bytes of the body = request line, headers, chunk sizes, trailers ≤ MAX_HEAD_BYTES + the chunks' own
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream_runtime.server.http.coalescing_transport import HeldHead
from millstream_runtime.server.http.disconnect import EXTENSION, HangUp

MAX_HEAD_BYTES = 64 << 10  # h11's, so what was accepted before still is
CHUNK_OVERHEAD = 8  # a chunk of one byte has five beside it; no client that means well sends many of those


class CappedHttpProtocol(HttpToolsProtocol):
    """A connection that sends more than that beside its body gets a 400 and is closed."""

    transport: HeldHead

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._beside_body_bytes = 0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = HeldHead(transport, self.loop)
        self._hang_up = HangUp(self.flow.resume_reading)

    def data_received(self, data: bytes) -> None:
        if self._beside_body_bytes > MAX_HEAD_BYTES + CHUNK_OVERHEAD * self._body_bytes:
            self.send_400_response(f"The request has more than {MAX_HEAD_BYTES} bytes of headers.")
            return
        self._beside_body_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        # The rest of the piece that begins it is not counted: at most what one read of the socket brings.
        self._beside_body_bytes = self._body_bytes = 0
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"hang_up": self._hang_up}}  # ASGI: a dict for each

    def on_body(self, body: bytes) -> None:
        self._beside_body_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        self.transport.expect_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._hang_up.mark()
