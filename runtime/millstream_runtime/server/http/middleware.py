"""The outermost ASGI middleware: API keys, body cap, request id, request counter, `Connection: close` in a drain."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.server.http.api_errors import ApiError, beyond_probe, from_status
from millstream_runtime.server.http.api_keys import OPEN_PATHS, PROBE_ROUTES, ApiKeys
from millstream_runtime.server.http.failure_log import log_failure
from millstream_runtime.server.http.limits import MAX_BODY_BYTES, MAX_PROBE_BODY_BYTES, MAX_REQUEST_ID_CHARACTERS

REQUEST_ID_HEADER = b"x-request-id"
_LOGGABLE_ID = re.compile(rf"[A-Za-z0-9._:/-]{{1,{MAX_REQUEST_ID_CHARACTERS}}}".encode())


class RequestCounter(Protocol):
    """Counts requests by method and route."""

    def began(self, method: str, route: str, status: int) -> None: ...

    def ended(self, method: str, route: str, seconds: float) -> None: ...


class RequestMiddleware:
    """Wraps the whole application, including its error responses."""

    def __init__(self, app: ASGIApp, ledger: BootLedger, keys: ApiKeys | None, counter: RequestCounter) -> None:
        """`keys` None: no authentication."""
        self._app = app
        self._ledger = ledger
        self._keys = keys
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_at_seconds = time.monotonic()
        headers = RequestHeaders.of(scope)
        request_id = request_id_of(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        answer_id = (REQUEST_ID_HEADER, request_id.encode())

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counter.began(scope["method"], route_of(scope), message["status"])
                added = [answer_id]
                if self._ledger.phase is Phase.DRAINING:
                    added.append((b"connection", b"close"))  # the client's next request goes to another replica
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, receive if headers.declares_body else _capped(receive), send_with_headers)
        except Exception as error:
            log_failure(request_id, error)
            raise  # uvicorn logs its traceback
        finally:
            self._counter.ended(scope["method"], route_of(scope), time.monotonic() - arrived_at_seconds)

    def _refusal(self, scope: Scope, headers: RequestHeaders) -> ApiError | None:
        """Return why the request is rejected; None after the tenant is stored in the request's state."""
        if self._keys is not None and scope["path"] not in OPEN_PATHS:
            holder = self._keys.holder(headers.authorization.decode("latin-1"))
            if holder is None:
                return ApiError(
                    401,
                    "This server needs an API key: send 'Authorization: Bearer <key>' with a valid one.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope["state"]["tenant"] = holder.tenant
            if holder.is_probe:
                scope["state"]["is_probe"] = True
                if (scope["method"], scope["path"]) not in PROBE_ROUTES or not _is_small(headers):
                    return beyond_probe()
        return from_status(413) if declared_bytes(headers.content_length) > MAX_BODY_BYTES else None


@dataclass(slots=True)
class RequestHeaders:
    """The headers that the middleware needs, read in one pass; the first value of a name counts."""

    request_id: bytes = b""
    authorization: bytes = b""
    content_length: bytes = b""
    has_transfer_encoding: bool = False

    @staticmethod
    def of(scope: Scope) -> RequestHeaders:
        found = RequestHeaders()
        for name, value in scope["headers"]:  # ASGI: names in lower case
            if name == b"content-length":
                found.content_length = found.content_length or value
            elif name == REQUEST_ID_HEADER:
                found.request_id = found.request_id or value
            elif name == b"authorization":
                found.authorization = found.authorization or value
            elif name == b"transfer-encoding":
                found.has_transfer_encoding = True
        return found

    @property
    def declares_body(self) -> bool:
        """Whether the length of the body is declared; the HTTP parser then enforces it, so it need not be counted."""
        return not self.has_transfer_encoding and self.content_length.isdigit()


def _is_small(headers: RequestHeaders) -> bool:
    """Whether the body is known to be as short as a probe's; a GET has none."""
    return not headers.has_transfer_encoding and declared_bytes(headers.content_length) <= MAX_PROBE_BODY_BYTES


def request_id_of(headers: RequestHeaders) -> str:
    """The client's id if it is short and plain, else a new one."""
    given = headers.request_id
    return given.decode() if _LOGGABLE_ID.fullmatch(given) else os.urandom(16).hex()


def route_of(scope: Scope) -> str:
    """The route's pattern; the client's path would make a metric of unbounded cardinality."""
    return str(getattr(scope.get("route"), "path", "none"))


def declared_bytes(length: bytes) -> int:
    return int(length) if length.isdigit() and len(length) < 20 else 0


def _capped(receive: Receive) -> Receive:
    """Enforce the body cap on a chunked body, which declares no length."""
    received_bytes = 0

    async def receive_capped() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > MAX_BODY_BYTES:
            raise HTTPException(413)
        return message

    return receive_capped
