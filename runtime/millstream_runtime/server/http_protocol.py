"""uvicorn's protocol on httptools (llhttp, in C), with the cap on headers that its own on h11 has and this one lacks.

llhttp keeps no line itself, and neither it nor uvicorn counts: a header that never ends, thousands of them, or trailers
behind a chunked body would fill the memory of the process before any route saw the request.

    received bytes - bytes of the body = request line, headers, chunk sizes, trailers ≤ MAX_HEAD_BYTES + the chunks' own
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # h11's, so what was accepted before still is
CHUNK_OVERHEAD = 8  # a chunk of one byte has five beside it; no client that means well sends many of those


class CappedHttpProtocol(HttpToolsProtocol):
    """A connection that sends more than that beside its body gets a 400 and is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._beside_body_bytes = 0
        self._body_bytes = 0

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

    def on_body(self, body: bytes) -> None:
        self._beside_body_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)
