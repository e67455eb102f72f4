"""The fault proxy: plain HTTP towards the operator, HTTPS towards the API server, trouble in between.

It forwards everything, streams watches, remembers every request with its time, and asks a `Plan` what should go wrong.
An outage refuses connections and cuts those that there are, as a dead API server does. Questions to a model go to the
fake runtime instead. It runs in the harness's own event loop.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from tests.soak import fake_runtime
from tests.soak.faults import Asked, Fault, Plan

TOKEN = "operator"
_DROPPED = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "authorization"})
_RETRY_AFTER_SECONDS = 1
_REASONS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}


@dataclass(slots=True)
class Exchange:
    """A request, what was done to it, and when it was answered."""

    asked: Asked
    fault: Fault | None = None
    status: int = 0
    answered_at: float = 0.0


@dataclass
class FaultProxy:
    """One operator's way to the API server."""

    upstream: str
    context: ssl.SSLContext
    plan: Plan = field(default_factory=Plan)
    kill: Callable[[], None] = lambda: None  # SIGKILL to the operator behind this proxy
    on_write: Callable[[Exchange], None] = lambda _exchange: None  # called for each answered write
    exchanges: list[Exchange] = field(default_factory=list)
    port: int = 0

    async def start(self) -> None:
        """Listen, on a free port at first and on the same one after an outage."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self.context, limit=0),
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        await self._listen()

    async def stop(self) -> None:
        await self._close()
        await self._session.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """No API server for the length of the block: nothing listens, and every connection is cut."""
        await self._close()
        yield
        await self._listen()

    async def outage(self, seconds: float) -> None:
        """No API server for so long."""
        async with self.away():
            await asyncio.sleep(seconds)

    def writes(self, since: float = 0.0, *, lease: bool = False) -> list[Exchange]:
        """Writes since a time, those of the Lease apart."""
        return [x for x in self.exchanges if x.asked.writes and x.asked.at >= since and x.asked.about_lease is lease]

    async def _listen(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A client that gives up ends the handler: what is kept for ever must not stay for ever.
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, shutdown_timeout=0.01, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        for connection in list(self._runner.server.connections if self._runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(
            asyncio.get_running_loop().time(),
            request.method,
            request.path,
            request.query.get("watch") in ("true", "1"),
            request.headers.get("User-Agent", ""),
        )
        exchange = Exchange(asked, self.plan.strikes(asked))
        self.exchanges.append(exchange)
        match exchange.fault:
            case Fault.CONFLICT | Fault.TOO_MANY | Fault.SERVER_ERROR:
                exchange.status = int(exchange.fault)
                return _refusal(exchange.status)
            case Fault.TIMEOUT:
                await asyncio.Event().wait()
            case Fault.KILLED_BEFORE:
                self.kill()
                return _cut(request)
        return await self._forward(request, exchange)

    async def _forward(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        if exchange.asked.asks_a_model:
            said = await self._ask_fake_runtime(exchange.asked)
            exchange.status = said.status
            return _cut(request) if exchange.fault is Fault.LOST_ANSWER else said
        body = await request.read() if request.can_read_body else None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        url = self.upstream + request.raw_path
        # A write that is under way is carried out, whatever becomes of the one who asked.
        async with self._session.request(request.method, URL(url, encoded=True), data=body, headers=headers) as answer:
            exchange.status = answer.status
            if exchange.asked.watch and exchange.fault is None:
                return await _stream(request, answer)
            content = b"" if exchange.asked.watch else await answer.read()
        exchange.answered_at = asyncio.get_running_loop().time()
        if exchange.asked.writes:
            self.on_write(exchange)
        if exchange.fault is Fault.KILLED_AFTER:
            self.kill()
        if exchange.fault is not None:
            return _cut(request)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _DROPPED}
        return web.Response(status=answer.status, body=content, headers=kept)

    async def _ask_fake_runtime(self, asked: Asked) -> web.Response:
        """Which Deployment stands behind the Service of that name, and with which configuration do its pods start?"""
        name = asked.name.partition(":")[0]
        workload = await self._get(f"/apis/apps/v1/namespaces/{asked.namespace}/deployments/{name}")
        boot_name = fake_runtime.boot_map_name(workload)
        boot = await self._get(f"/api/v1/namespaces/{asked.namespace}/configmaps/{boot_name}") if boot_name else None
        status, body = fake_runtime.answer(asked.path.partition("/proxy")[2], workload, boot)
        return web.json_response(body, status=status)

    async def _get(self, path: str) -> dict[str, Any] | None:
        async with self._session.get(self.upstream + path) as answer:
            return json.loads(await answer.read()) if answer.status == 200 else None


async def _stream(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass a watch on, event by event."""
    response = web.StreamResponse(
        status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "")}
    )
    with suppress(ConnectionError, aiohttp.ClientError):
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    return response


def _refusal(status: int) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": status,
        "reason": _REASONS[status],
        "message": "injected by the fault proxy",
    }
    return web.json_response(
        body, status=status, headers={"Retry-After": str(_RETRY_AFTER_SECONDS)} if status == 429 else {}
    )


def _cut(request: web.Request) -> web.Response:
    """End the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
