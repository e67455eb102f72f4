"""Answers to HTTP/1.0 clients, which do not know chunks: a body of unknown length ends with the connection.

uvicorn sends every answer without a `Content-Length` in chunks, whatever the client's version. RFC 9112, 6.1: a server
must not send `Transfer-Encoding` to such a client.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap `app` for one request; `cycle` is uvicorn's state of it. It closes the connection after the answer."""

    async def unchunked(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # of this piece, as uvicorn checks it
            await send(message)

        await app(scope, receive, send_unchunked)

    return unchunked
