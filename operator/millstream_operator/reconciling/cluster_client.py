"""The operator's writes and direct reads: a thin asynchronous client of the API server.

Every request has a timeout, every failure is an `ApiError` or an `ApiUnreachable`, and nothing is retried here: the
work queue does that, from fresh state. Writes are server-side apply with one field manager, forced. Credentials are
kopf's own (`ConnectionInfo`), so the watches and the writes always speak to the same server as the same account; they
are read anew when the server refuses them, because service-account tokens rotate.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import kopf

from millstream_operator.reconciling.kinds import Kind, kind_of
from millstream_operator.rendering.names import MANAGER

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
REQUEST_TIMEOUT_SECONDS = 15.0
LIST_TIMEOUT_SECONDS = 60.0
LIST_PAGE = 500
MAX_CONNECTIONS = 16


class ApiUnreachable(Exception):
    """No answer from the API server. What was asked may have happened all the same."""


class ApiError(Exception):
    """The API server said no. `reason` is the machine-readable word of its Status object, `status` the HTTP code."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.retry_after_seconds = retry_after_seconds


class ClusterClient:
    """One API server, one account. `login` gives the credentials each time they are needed anew."""

    def __init__(self, login: Callable[[], kopf.ConnectionInfo]) -> None:
        self._login = login
        self._info: kopf.ConnectionInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        self.writes = 0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        """The live object, or None."""
        try:
            return await self._request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str | None, selector: str | None) -> tuple[list[dict[str, Any]], str]:
        """All objects of a kind (of one namespace, or of all), and the resourceVersion of the listing."""
        query = {"limit": str(LIST_PAGE)} | ({"labelSelector": selector} if selector else {})
        items: list[dict[str, Any]] = []
        while True:
            path = kind.path(namespace)
            page = await self._request("GET", path, query=query, timeout_seconds=LIST_TIMEOUT_SECONDS)
            # Items of a list carry neither their kind nor their version.
            items += ({"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page["items"])
            token = page["metadata"].get("continue")
            if not token:
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = token

    async def apply(self, manifest: Mapping[str, Any], subresource: str | None = None) -> dict[str, Any]:
        """Server-side apply: our fields become as given, our former fields go, everyone else's stay."""
        kind, metadata = kind_of(dict(manifest)), manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": MANAGER, "force": "true"}
        self.writes += 1
        return await self._request("PATCH", path, query=query, body=manifest, content_type=APPLY)

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create; an object of that name is an ApiError with reason AlreadyExists."""
        path = kind_of(dict(manifest)).path(manifest["metadata"]["namespace"])
        self.writes += 1
        return await self._request("POST", path, query={"fieldManager": MANAGER}, body=manifest)

    async def merge(self, kind: Kind, namespace: str, name: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """JSON merge patch."""
        self.writes += 1
        query = {"fieldManager": MANAGER}
        return await self._request("PATCH", kind.path(namespace, name), query=query, body=change, content_type=MERGE)

    async def delete(self, kind: Kind, manifest: Mapping[str, Any]) -> None:
        """Delete exactly this state of this object: another one of the name, or a newer state, is a Conflict."""
        metadata = manifest["metadata"]
        options = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
        }
        self.writes += 1
        try:
            await self._request("DELETE", kind.path(metadata["namespace"], metadata["name"]), body=options)
        except ApiError as error:
            if error.status != 404:
                raise

    async def get_raw(self, path: str, timeout_seconds: float) -> dict[str, Any]:
        """GET of any path that answers JSON (the Service proxy of a development setup)."""
        return await self._request("GET", path, timeout_seconds=timeout_seconds)

    async def post_raw(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """POST of JSON to any path that answers JSON."""
        return await self._request("POST", path, body=body, timeout_seconds=timeout_seconds)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        try:
            return await self._send(method, path, query, body, content_type, timeout_seconds)
        except ApiError as error:
            if error.status != 401:
                raise
        await self.close()  # a rotated token: log in again, once
        return await self._send(method, path, query, body, content_type, timeout_seconds)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout_seconds: float,
    ) -> dict[str, Any]:
        session, server = self._connect()
        try:
            async with session.request(
                method,
                server + path,
                params=query,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": content_type} if body is not None else {},
                timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            ) as response:
                text = await response.text()
                if response.status >= 400:
                    raise _api_error(response.status, text, response.headers.get("Retry-After"))
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, asyncio.IncompleteReadError) as error:
            raise ApiUnreachable(f"{method} {path}: {type(error).__name__} {error}".rstrip()) from error
        try:
            answer = json.loads(text)
        except ValueError:
            raise ApiUnreachable(f"{method} {path}: the answer is no JSON") from None
        return answer if isinstance(answer, dict) else {"value": answer}

    def _connect(self) -> tuple[aiohttp.ClientSession, str]:
        if self._session is None or self._info is None:
            self._info = self._login()
            context = self._info.as_ssl_context() if self._info.server.startswith("https") else False
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=context),
                headers={**self._info.as_http_headers(), "User-Agent": MANAGER, "Accept": "application/json"},
            )
        return self._session, self._info.server.rstrip("/")


def _api_error(status: int, text: str, retry_after: str | None) -> ApiError:
    """The Status object that the API server answers errors with; a proxy in between may answer anything."""
    try:
        told = json.loads(text)
    except ValueError:
        told = {}
    told = told if isinstance(told, dict) else {}
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else 0.0
    message = told.get("message") or f"HTTP {status}: {text[:200]}"
    return ApiError(status, told.get("reason") or "", str(message), seconds)
