"""How a pod is asked for its report: over a real socket, and through a fake of the API server's proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from millstream_operator.kube import pod_access
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.pod_access import DirectPods, PodUnreachable, ProxyPods
from tests.support.aiohttp_server import http_server

POD = {"metadata": {"name": "demo-0", "namespace": "team"}, "status": {"podIP": "127.0.0.1"}}
PATIENCE_SECONDS = 60.0  # for what answers at once, on a machine that does much else
LOADING = {"ready": False, "phase": "LoadingWeights", "message": "Reading."}


@asynccontextmanager
async def pod_that_answers(answer: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async def ready(_: web.Request) -> web.StreamResponse:
        response: web.StreamResponse = await answer()
        return response

    async with http_server(ready) as port:
        monkeypatch.setattr(pod_access, "RUNTIME_PORT", port)
        yield


async def loading() -> web.Response:
    return web.json_response(LOADING, status=503)


async def not_json() -> web.Response:
    return web.Response(text="<html>")


async def a_list() -> web.Response:
    return web.json_response([1])


async def redirect() -> web.Response:
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/secret"})


async def endless() -> web.Response:
    return web.json_response({"phase": "x" * (1 << 20)})


async def deeply_nested() -> web.Response:
    return web.Response(text="[" * 60_000)


async def slow() -> web.Response:
    await asyncio.sleep(30)
    return await loading()


async def test_a_pod_that_is_not_ready_answers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pod_that_answers(loading, monkeypatch):
        assert await DirectPods().ready(POD, PATIENCE_SECONDS) == LOADING


@pytest.mark.parametrize("answer", [not_json, a_list, redirect, endless, deeply_nested, slow])
async def test_an_answer_that_is_no_report_is_an_error(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pod_that_answers(answer, monkeypatch):
        with pytest.raises(PodUnreachable):
            await DirectPods().ready(POD, 0.3)


async def test_a_pod_without_an_address_or_a_listener_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_access, "RUNTIME_PORT", 1)
    for pod in (POD, {**POD, "status": {}}):
        with pytest.raises(PodUnreachable):
            await DirectPods().ready(pod, 1.0)


async def test_a_report_in_chunks_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body used to end with the first chunk that had arrived."""

    async def in_chunks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=503)
        response.enable_chunked_encoding()
        await response.prepare(request)
        text = json.dumps(LOADING).encode()
        for begin in range(0, len(text), 8):
            await response.write(text[begin : begin + 8])
            await asyncio.sleep(0)
        return response

    async with http_server(in_chunks) as port:
        monkeypatch.setattr(pod_access, "RUNTIME_PORT", port)
        assert await DirectPods().ready(POD, PATIENCE_SECONDS) == LOADING


async def test_metrics_are_text_and_any_other_answer_than_200_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pod_that_answers(not_json, monkeypatch):
        assert await DirectPods().metrics(POD, PATIENCE_SECONDS) == "<html>"
    for answer in (loading, redirect, slow):
        async with pod_that_answers(answer, monkeypatch):
            with pytest.raises(PodUnreachable):
                await DirectPods().metrics(POD, 0.3)
    monkeypatch.setattr(pod_access, "METRICS_LIMIT_BYTES", 1 << 10)
    async with pod_that_answers(endless, monkeypatch):
        with pytest.raises(PodUnreachable):
            await DirectPods().metrics(POD, PATIENCE_SECONDS)


class Proxy(ClusterClient):
    """A fake of the connection to the API server."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.paths = error, list[str]()

    async def get_raw(self, path: str, timeout_seconds: float) -> dict[str, Any]:
        self.paths.append(path)
        if self.error is not None:
            raise self.error
        return {"phase": "Ready"}

    async def get_text(self, path: str, timeout_seconds: float) -> str:
        return str(await self.get_raw(path, timeout_seconds))


async def test_the_proxy_passes_a_503_on_with_its_body() -> None:
    proxy = Proxy(ApiError(503, "", "Reading.", body=LOADING))
    assert await ProxyPods(proxy).ready(POD, 1.0) == LOADING
    assert proxy.paths == ["/api/v1/namespaces/team/pods/demo-0:8000/proxy/ready"]
    assert await ProxyPods(Proxy(None)).ready(POD, 1.0) == {"phase": "Ready"}


@pytest.mark.parametrize(
    "error",
    [
        ApiError(503, "ServiceUnavailable", "no endpoints", body={"kind": "Status"}),
        ApiError(403, "Forbidden", "no rights"),
        ApiUnreachable("GET: TimeoutError"),
    ],
)
async def test_the_proxys_own_refusals_are_no_report(error: Exception) -> None:
    with pytest.raises(PodUnreachable):
        await ProxyPods(Proxy(error)).ready(POD, 1.0)
    with pytest.raises(PodUnreachable):
        await ProxyPods(Proxy(error)).metrics(POD, 1.0)
