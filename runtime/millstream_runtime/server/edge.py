"""The outermost layer, plain ASGI: body cap, request id, and `Connection: close` while draining."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.server.api_errors import from_status
from millstream_runtime.server.limits import MAX_BODY_BYTES, MAX_REQUEST_ID_CHARACTERS

REQUEST_ID_HEADER = "x-request-id"
_FIT_FOR_A_LOG = re.compile(rf"[A-Za-z0-9._:/-]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")


class EdgeMiddleware:
    """Wraps the whole application, its error pages too."""

    def __init__(self, app: ASGIApp, ledger: BootLedger) -> None:
        self._app = app
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer[REQUEST_ID_HEADER] = request_id
                if self._ledger.snapshot().phase is Phase.DRAINING:
                    answer["connection"] = "close"  # the client's next request goes to another replica
            await send(message)

        if declared_bytes(headers) > MAX_BODY_BYTES:
            await from_status(413).response()(scope, receive, send_with_headers)
            return
        await self._app(scope, _capped(receive), send_with_headers)


def request_id_of(headers: Headers) -> str:
    """The client's own id when it is short and plain, else a fresh one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _FIT_FOR_A_LOG.fullmatch(given) else uuid.uuid4().hex


def declared_bytes(headers: Headers) -> int:
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def _capped(receive: Receive) -> Receive:
    """Count a chunked body, whose length nobody declared."""
    received_bytes = 0

    async def receive_capped() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > MAX_BODY_BYTES:
            raise HTTPException(413)
        return message

    return receive_capped
