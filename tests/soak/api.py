"""The harness's own client of the API server: direct, never through the fault proxy."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp

Object = dict[str, Any]
T = TypeVar("T")
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
LLMDS = "/apis/millstream.dev/v1alpha1"
TIMEOUT_SECONDS = 60.0


class Refused(Exception):
    """The API server's answer is an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message


class Api:
    """One account at one server."""

    def __init__(self, url: str, token: str, context: ssl.SSLContext, connections: int = 32) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=connections),
            headers={"Authorization": f"Bearer {token}", "User-Agent": "soak"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
        )

    async def close(self) -> None:
        await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """The parsed answer; raises Refused for an error status."""
        data = json.dumps(body) if body is not None else None
        headers = {"Content-Type": content_type} if body is not None else {}
        async with self._session.request(method, self._url + path, data=data, headers=headers, params=query) as answer:
            text = await answer.text()
        if answer.status >= 400:
            try:
                message = json.loads(text).get("message", text)
            except ValueError:
                message = text
            raise Refused(answer.status, str(message)[:500])
        found: Object = json.loads(text) if text.startswith("{") else {"text": text}
        return found

    async def is_ready(self) -> bool:
        """Does the API server say that it is ready?"""
        try:
            return (await self.request("GET", "/readyz")).get("text") == "ok"
        except (aiohttp.ClientError, TimeoutError, Refused):
            return False

    async def get(self, path: str) -> Object | None:
        """The object, or None."""
        try:
            return await self.request("GET", path)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    async def items(self, path: str, query: Mapping[str, str] | None = None) -> list[Object]:
        """The items of a list."""
        items: list[Object] = (await self.request("GET", path, query=query)).get("items") or []
        return items

    async def create(self, path: str, body: Object, **query: str) -> Object:
        return await self.request("POST", path, body, query=query)

    async def merge(self, path: str, change: Object) -> Object:
        """JSON merge patch."""
        return await self.request("PATCH", path, change, content_type=MERGE)

    async def apply(self, path: str, body: Object, manager: str) -> Object:
        """Server-side apply, forced."""
        query = {"fieldManager": manager, "force": "true"}
        return await self.request("PATCH", path, body, content_type=APPLY, query=query)

    async def replace_spec(self, namespace: str, name: str, spec: Object) -> Object:
        """Put a whole new spec in an LLMDeployment's place, whatever its version (what `kubectl replace` does)."""
        path = llmd_path(namespace, name)
        while True:
            live = await self.request("GET", path)
            try:
                return await self.request("PUT", path, {**live, "spec": spec})
            except Refused as error:
                if error.status != 409:
                    raise

    async def delete(self, path: str, policy: str = "Background") -> None:
        """Delete, in the background by default; an object that is gone is no error."""
        try:
            await self.request("DELETE", path, {"propagationPolicy": policy})
        except Refused as error:
            if error.status != 404:
                raise

    async def watch(self, path: str, version: str) -> AsyncIterator[Object]:
        """Watch events, until the server ends the stream."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "3600"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(self._url + path, params=query, timeout=timeout) as answer:
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)


ALL_LLMDEPLOYMENTS = "/apis/millstream.dev/v1alpha1/llmdeployments"


def llmd_path(namespace: str, name: str = "") -> str:
    """URL path of an LLMDeployment, or of a namespace's."""
    return f"{LLMDS}/namespaces/{namespace}/llmdeployments" + (f"/{name}" if name else "")


def llmd(name: str, spec: Object) -> Object:
    return {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": spec,
    }


def condition(manifest: Object, kind: str) -> Object:
    """A condition of the status, or an empty one."""
    found = (manifest.get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def is_ready(manifest: Object) -> bool:
    """Ready, and of the generation that is there now."""
    ready = condition(manifest, "Ready")
    return bool(ready.get("status") == "True" and ready.get("observedGeneration") == manifest["metadata"]["generation"])


class TooSlow(Exception):
    """What was waited for did not come about. `str()` says what was seen instead."""


async def eventually(
    look: Callable[[], Awaitable[T]],
    holds: Callable[[T], bool],
    *,
    what: str,
    seconds: float,
    pause_seconds: float = 0.1,
) -> T:
    """Look again until it holds; raises TooSlow with the last thing that was seen."""
    give_up = asyncio.get_running_loop().time() + seconds
    while True:
        seen = await look()
        if holds(seen):
            return seen
        if asyncio.get_running_loop().time() > give_up:
            raise TooSlow(f"not {what} after {seconds:.0f} s; last seen: {_short(seen)}")
        await asyncio.sleep(pause_seconds)


def _short(seen: object) -> str:
    """Of an LLMDeployment the conditions, which say why."""
    if isinstance(seen, dict) and "conditions" in (seen.get("status") or {}):
        seen = {"generation": seen["metadata"].get("generation"), "conditions": seen["status"]["conditions"]}
    return json.dumps(seen, default=str)[:2000]
