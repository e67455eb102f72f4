"""The outermost layer, plain ASGI: keys, body cap, request id, request counter, `Connection: close` while draining."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.server.api_errors import ApiError, from_status
from millstream_runtime.server.api_keys import OPEN_PATHS, ApiKeys
from millstream_runtime.server.limits import MAX_BODY_BYTES, MAX_REQUEST_ID_CHARACTERS

REQUEST_ID_HEADER = "x-request-id"
_FIT_FOR_A_LOG = re.compile(rf"[A-Za-z0-9._:/-]{{1,{MAX_REQUEST_ID_CHARACTERS}}}")
CountRequest = Callable[[str, str, int], None]  # method, route, status


class EdgeMiddleware:
    """Wraps the whole application, its error pages too."""

    def __init__(self, app: ASGIApp, ledger: BootLedger, keys: ApiKeys | None, count_request: CountRequest) -> None:
        """`keys` None: everyone may ask."""
        self._app = app
        self._ledger = ledger
        self._keys = keys
        self._count_request = count_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = scope.setdefault("state", {})["request_id"] = request_id_of(headers)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count_request(scope["method"], route_of(scope), message["status"])
                answer = MutableHeaders(scope=message)
                answer[REQUEST_ID_HEADER] = request_id
                if self._ledger.snapshot().phase is Phase.DRAINING:
                    answer["connection"] = "close"  # the client's next request goes to another replica
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_headers)
            return
        await self._app(scope, _capped(receive), send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Why the request goes no further; else the state of the request learns who its tenant is."""
        if self._keys is not None and scope["path"] not in OPEN_PATHS:
            tenant = self._keys.tenant(headers.get("authorization", ""))
            if tenant is None:
                return ApiError(
                    401,
                    "This server needs an API key: send 'Authorization: Bearer <key>' with a valid one.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope.setdefault("state", {})["tenant"] = tenant
        return from_status(413) if declared_bytes(headers) > MAX_BODY_BYTES else None


def request_id_of(headers: Headers) -> str:
    """The client's own id when it is short and plain, else a fresh one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _FIT_FOR_A_LOG.fullmatch(given) else uuid.uuid4().hex


def route_of(scope: Scope) -> str:
    """The route's own pattern: a path as the client wrote it would make a metric without end."""
    return str(getattr(scope.get("route"), "path", "none"))


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
