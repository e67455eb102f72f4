"""The operator's writes and direct reads: a thin asynchronous client of the API server.

Every request has a timeout, every failure is an `ApiError` or an `ApiUnreachable`, and nothing is retried here: the
work queue retries, from fresh state. Writes are server-side apply with one field manager, forced. Credentials are
kopf's own (`ConnectionInfo`), so the watches and the writes always speak to the same server as the same account; they
are read anew when the server refuses them, because service-account tokens rotate.

Every request that could change something passes the fence, which refuses it with NotLeader once this replica may no
longer write. The fence is checked when the request begins and again just before the body is sent, since a request may
wait for a connection in between; every write has a body.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import kopf
from aiohttp.abc import AbstractStreamWriter

from millstream_operator.kube.bounded_http import UnusableAnswer, read_up_to
from millstream_operator.kube.fence import Fence, NotLeader
from millstream_operator.kube.kinds import Kind, kind_of
from millstream_operator.rendering.names import MANAGER

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
REQUEST_TIMEOUT_SECONDS = 15.0
LIST_TIMEOUT_SECONDS = 60.0
LIST_PAGE = 50  # objects of a page at most
FIRST_PAGE = 10
PAGE_BYTES = 1 << 20  # of JSON: an object with its managed fields is some 10 KB, and a hostile one may have 1.5 MB
WATCH_SILENCE_SECONDS = 70.0  # the API server sends a bookmark a minute
# Well above the number of workers: aiohttp hands a free connection to the next caller and not to the one that has
# waited longest, so workers that use all of them would starve listings, Events and probes of pods.
MAX_CONNECTIONS = 40
RAW_LIMIT_BYTES = 1 << 20  # of an answer that may be a pod's own
NO_VERSION = "1"  # etcd's revision of the empty store: the first object that is written gets 2


class ApiUnreachable(Exception):
    """No answer from the API server. The request may have taken effect all the same."""


class ApiError(Exception):
    """The API server refused. `reason` is the machine-readable word of its Status object, `status` the HTTP code.

    `body` is the whole answer where it was a JSON object; behind a proxy path, it is the answer of the pod or Service.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after_seconds: float = 0.0,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.retry_after_seconds = retry_after_seconds
        self.body: Mapping[str, Any] = body or {}


def refused_fields(error: ApiError) -> Iterator[str]:
    """The fields that the API server's answer names."""
    details = error.body.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes if isinstance(causes, list) else ():
        if isinstance(cause, dict) and isinstance(cause.get("field"), str):
            yield cause["field"]


class RequestObserver(Protocol):
    """Counts the requests to the API server."""

    def write(self, verb: str, what: str) -> None:
        """A write is sent; `what` is Kind or Kind/subresource."""
        ...

    def error(self, code: str) -> None:
        """An HTTP status from 400 on, or `unreachable`."""
        ...


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, str]
    body: Mapping[str, Any] | None
    content_type: str
    timeout_seconds: float
    fence: Fence | None = None
    limit_bytes: int | None = None  # of the answer; None: the API server's own objects
    as_text: bool = False  # the answer is no JSON: it is returned as {"text": …}
    measure: Callable[[int], None] | None = None  # called with the length of the answer

    def payload(self) -> bytes | FencedBody | None:
        if self.body is None:
            return None
        data = json.dumps(self.body).encode()
        return data if self.fence is None else FencedBody(data, self.fence)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, and the resourceVersion of the whole."""

    items: list[dict[str, Any]]
    version: str
    num_objects: int = LIST_PAGE  # of pages of about PAGE_BYTES, by the largest objects so far


class PageSizes:
    """How many objects the next page may have, so that it is about PAGE_BYTES and of `limit` objects at most.

    A page is held as bytes, as text and as objects, and several kinds are listed at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.next = min(FIRST_PAGE, limit)
        self.fewest = limit

    def received(self, num_objects: int, num_bytes: int) -> None:
        if num_objects:
            self.next = max(1, min(self._limit, num_objects * PAGE_BYTES // max(1, num_bytes)))
            self.fewest = min(self.fewest, self.next)


class FencedBody(aiohttp.BytesPayload):
    """A body that is not sent once the fence is closed. A request without its body changes nothing."""

    def __init__(self, body: bytes, fence: Fence) -> None:
        super().__init__(body, content_type="application/json")
        self._fence = fence

    async def write(self, writer: AbstractStreamWriter) -> None:
        self._fence.check()
        await super().write(writer)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._fence.check()
        await super().write_with_length(writer, content_length)


class ClusterClient:
    """A client of one API server with one account. `login` is called again when the credentials are refused.

    Writes raise NotLeader while `fence` is closed. `agent` is the User-Agent: the audit log shows which replica wrote.
    """

    def __init__(
        self,
        login: Callable[[], kopf.ConnectionInfo],
        fence: Fence | None = None,
        observer: RequestObserver | None = None,
        agent: str = MANAGER,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> None:
        self._login = login
        self._fence = fence if fence is not None else Fence()
        self._observer = observer
        self._agent = agent
        self._timeout_seconds = timeout_seconds
        self._info: kopf.ConnectionInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        self.writes = 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """Return the live object, or None."""
        try:
            return await self._request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str | None, selector: str | None) -> tuple[list[dict[str, Any]], str]:
        """Return all objects of a kind (of one namespace, or of all), and the resourceVersion of the listing."""
        items: list[dict[str, Any]] = []
        version = ""
        async for page in self.pages(kind, namespace, {"labelSelector": selector} if selector else {}):
            # Items of a list carry neither their kind nor their version.
            items += ({"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page.items)
            version = page.version
        return items, version

    async def pages(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], limit: int = LIST_PAGE
    ) -> AsyncIterator[Page]:
        """Yield a listing page by page: of `limit` objects at most, and of fewer where they are large."""
        path, sizes = kind.path(namespace), PageSizes(limit)
        asked = {**query, "limit": str(sizes.next)}
        while True:
            lengths: list[int] = []
            page = await self._request(
                "GET", path, query=asked, timeout_seconds=LIST_TIMEOUT_SECONDS, measure=lengths.append
            )
            sizes.received(len(page["items"]), lengths[-1])
            yield Page(page["items"], page["metadata"]["resourceVersion"], sizes.fewest)
            token = page["metadata"].get("continue")
            if not token:
                return
            asked |= {"continue": token, "limit": str(sizes.next)}

    async def watch(
        self, kind: Kind, query: Mapping[str, str], version: str, seconds: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield events of a kind after a version, bookmarks included, for at most `seconds`."""
        asked = {**query, "watch": "true", "allowWatchBookmarks": "true"}
        asked |= {"resourceVersion": version, "timeoutSeconds": str(seconds)}
        timeout = aiohttp.ClientTimeout(total=seconds + 10, sock_connect=10, sock_read=WATCH_SILENCE_SECONDS)
        session, server = self._connect()
        try:
            async with session.get(server + kind.path(None), params=asked, timeout=timeout) as response:
                if response.status == 401:
                    await self.close()  # a rotated token: the next request logs in again
                if response.status >= 400:
                    raise _api_error(response.status, await response.text(), response.headers.get("Retry-After"))
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in filter(None, lines):
                        yield json.loads(line)
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, ValueError) as error:
            raise ApiUnreachable(f"watch of {kind.plural}: {type(error).__name__} {error}".rstrip()) from error

    async def apply(self, manifest: Mapping[str, Any], subresource: str | None = None) -> dict[str, Any]:
        """Server-side apply: set our fields, remove those we no longer send, keep those of other managers."""
        kind, metadata = kind_of(dict(manifest)), manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": MANAGER, "force": "true"}
        self._count("apply", f"{kind.kind}/{subresource}" if subresource else kind.kind)
        return await self._request("PATCH", path, query=query, body=manifest, content_type=APPLY)

    async def apply_new(self, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
        """Server-side apply of an object that does not exist yet; return None where the name is taken, by anyone.

        An apply that names a resourceVersion is refused with a Conflict for every other version of the object, and
        creates where there is none. No object has NO_VERSION, so one request does what a GET and a forced apply would.
        A server that refuses to create like this also yields None, and the caller reads the object itself.
        """
        metadata = {**manifest["metadata"], "resourceVersion": NO_VERSION}
        try:
            return await self.apply({**manifest, "metadata": metadata})
        except ApiError as error:
            if error.status == 409:
                return None
            raise

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create; an object of that name is an ApiError with reason AlreadyExists."""
        kind = kind_of(dict(manifest))
        self._count("create", kind.kind)
        path = kind.path(manifest["metadata"]["namespace"])
        return await self._request("POST", path, query={"fieldManager": MANAGER}, body=manifest)

    async def put(self, kind: Kind, manifest: Mapping[str, Any], *, create: bool) -> dict[str, Any]:
        """Create, or replace exactly the resourceVersion that the manifest names; otherwise an ApiError 409.

        Not fenced: the Lease is written with it, and the fence depends on the Lease.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        self._count("create" if create else "update", kind.kind)
        return await self._request(
            "POST" if create else "PUT",
            kind.path(namespace) if create else kind.path(namespace, name),
            query={"fieldManager": MANAGER},
            body=manifest,
            fenced=False,
        )

    async def merge(self, kind: Kind, namespace: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """JSON merge patch."""
        self._count("patch", kind.kind)
        query = {"fieldManager": MANAGER}
        return await self._request("PATCH", kind.path(namespace, name), query=query, body=change, content_type=MERGE)

    async def delete(self, kind: Kind, manifest: Mapping[str, Any]) -> None:
        """Delete exactly this state of this object: another object of the name, or a newer state, is a Conflict."""
        metadata = manifest["metadata"]
        options = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
        }
        self._count("delete", kind.kind)
        try:
            await self._request("DELETE", kind.path(metadata["namespace"], metadata["name"]), body=options)
        except ApiError as error:
            if error.status != 404:
                raise

    async def get_raw(self, path: str, timeout_seconds: float) -> dict[str, Any]:
        """GET of any path that answers JSON (the Service and pod proxies of a development setup)."""
        return await self._request("GET", path, timeout_seconds=timeout_seconds, limit_bytes=RAW_LIMIT_BYTES)

    async def get_text(self, path: str, timeout_seconds: float) -> str:
        """GET of any path that answers text, as `get_raw`."""
        answer = await self._request(
            "GET", path, timeout_seconds=timeout_seconds, limit_bytes=RAW_LIMIT_BYTES, as_text=True
        )
        return str(answer["text"])

    async def post_raw(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """POST of JSON to any path that answers JSON. Not fenced: a request to a model changes no object."""
        return await self._request(
            "POST", path, body=body, timeout_seconds=timeout_seconds, fenced=False, limit_bytes=RAW_LIMIT_BYTES
        )

    def _count(self, verb: str, what: str) -> None:
        self.writes += 1
        if self._observer is not None:
            self._observer.write(verb, what)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout_seconds: float | None = None,
        fenced: bool = True,
        limit_bytes: int | None = None,
        as_text: bool = False,
        measure: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        request = _Request(
            method, path, dict(query or {}), body, content_type, seconds, None, limit_bytes, as_text, measure
        )
        send = self._write if fenced and method != "GET" else self._send
        try:
            try:
                return await send(request)
            except ApiError as error:
                # Behind a proxy path it may be the pod that asks for a key of its own.
                if error.status != 401 or (limit_bytes is not None and error.body.get("kind") != "Status"):
                    raise
            await self.close()  # a rotated token: log in again, once
            return await send(request)
        except ApiError as error:
            if self._observer is not None:
                self._observer.error(str(error.status))
            raise
        except ApiUnreachable:
            if self._observer is not None:
                self._observer.error("unreachable")
            raise

    async def _write(self, request: _Request) -> dict[str, Any]:
        """Send within the fence. `timeout` in the query also limits the server, which may work on after we give up."""
        with self._fence.write(request.timeout_seconds) as permit:
            query = {**request.query, "timeout": f"{int(permit.seconds * 1000)}ms"}
            try:
                answer = await self._send(
                    dataclasses.replace(request, query=query, timeout_seconds=permit.seconds, fence=self._fence)
                )
            except ApiError:
                permit.answered = True
                raise
            permit.answered = True
            return answer

    async def _send(self, request: _Request) -> dict[str, Any]:
        session, server = self._connect()
        what = f"{request.method} {request.path}"
        try:
            async with session.request(
                request.method,
                server + request.path,
                params=request.query,
                data=request.payload(),
                headers={"Content-Type": request.content_type} if request.body is not None else {},
                timeout=aiohttp.ClientTimeout(total=request.timeout_seconds),
                allow_redirects=False,  # the credentials are for this server
            ) as response:
                limit = request.limit_bytes
                text = await (response.text() if limit is None else _text_up_to(response, limit))
                if response.status >= 300:
                    raise _api_error(response.status, text, response.headers.get("Retry-After"))
        except UnusableAnswer as problem:
            raise ApiUnreachable(f"{what} {problem}") from None
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError) as error:
            if isinstance(error.__cause__, NotLeader):  # aiohttp wraps what a body raises
                raise error.__cause__ from None
            raise ApiUnreachable(f"{what}: {type(error).__name__} {error}".rstrip()) from error
        if request.measure is not None:
            request.measure(len(text))
        if request.as_text:
            return {"text": text}
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            raise ApiUnreachable(f"{what}: the answer is no JSON") from None
        return answer if isinstance(answer, dict) else {"value": answer}

    def _connect(self) -> tuple[aiohttp.ClientSession, str]:
        if self._session is None or self._info is None:
            self._info = self._login()
            context = self._info.as_ssl_context() if self._info.server.startswith("https") else False
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=context),
                headers={**self._info.as_http_headers(), "User-Agent": self._agent, "Accept": "application/json"},
            )
        return self._session, self._info.server.rstrip("/")


async def _text_up_to(response: aiohttp.ClientResponse, limit_bytes: int) -> str:
    return (await read_up_to(response, limit_bytes)).decode(errors="replace")


def _api_error(status: int, text: str, retry_after: str | None) -> ApiError:
    """Read the Status object that the API server answers errors with; a proxy in between may answer anything."""
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        payload = {}
    payload = payload if isinstance(payload, dict) else {}
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else 0.0
    message = payload.get("message") or f"HTTP {status}: {text[:200]}"
    return ApiError(status, str(payload.get("reason") or ""), str(message), seconds, payload)
