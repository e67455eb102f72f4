"""The probe over a real socket: any program may answer behind the Service, in any manner."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web

from millstream_operator.kube.client import ClusterClient
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.probing import service_probe
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.probe_key import NO_KEY, ProbeKey
from millstream_operator.probing.service_probe import DirectAccess, ProxyAccess, ServiceAccess, probe_service
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import render_revision
from tests.support.aiohttp_server import Handler, http_server
from tests.support.llmdeployments import deployment

OWNER = deployment()
REVISION = render_revision(OWNER, plan_from_spec(OWNER, PlanDefaults("registry.example.com/runtime:1")), PodDefaults())
READY = {"config_hash": REVISION.config_hash, "model": REVISION.served_name, "phase": "Ready"}
TOKEN: dict[str, Any] = {"choices": [{"text": "!"}], "usage": {"completion_tokens": 1}}
KEY = ProbeKey("operator-probe-0123456789")


async def model(request: web.Request) -> web.StreamResponse:
    """A model that answers as it should."""
    return web.json_response(READY if request.path.endswith("/ready") else TOKEN)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers at once may take long on a machine that does much else."""
    monkeypatch.setattr(service_probe, "READY_TIMEOUT_SECONDS", 60.0)


@asynccontextmanager
async def service(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServiceAccess]:
    async with http_server(handler) as port:
        monkeypatch.setattr(service_probe, "service_url", lambda _: f"http://127.0.0.1:{port}")
        yield DirectAccess()


@asynccontextmanager
async def proxy(handler: Handler, logins: Callable[[], None] = lambda: None) -> AsyncIterator[ServiceAccess]:
    """The API server, as far as its Service proxy goes."""
    async with http_server(handler) as port:

        def login() -> kopf.ConnectionInfo:
            logins()
            return kopf.ConnectionInfo(server=f"http://127.0.0.1:{port}", token="the-operators-own")

        client = ClusterClient(login)
        try:
            yield ProxyAccess(client)
        finally:
            await client.close()


async def probed(access: ServiceAccess, key: ProbeKey = NO_KEY) -> Answer:
    return await probe_service(access, OWNER, REVISION, key)


def failure(answer: Answer) -> tuple[str, str]:
    assert answer.failure is not None
    return str(answer.failure.reason), answer.failure.message


async def in_pieces(request: web.Request) -> web.StreamResponse:
    """As a streaming proxy answers: chunk by chunk, with pauses in between."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    text = json.dumps(READY if request.path.endswith("/ready") else TOKEN).encode()
    for begin in range(0, len(text), 16):
        await response.write(text[begin : begin + 16])
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def test_an_answer_in_chunks_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(in_pieces, monkeypatch) as access:
        assert (await probed(access)).failure is None


async def test_an_answer_just_below_the_limit_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async def long(request: web.Request) -> web.StreamResponse:
        body = READY if request.path.endswith("/ready") else TOKEN
        return web.json_response({**body, "padding": "x" * ((1 << 20) - 512)})

    async with service(long, monkeypatch) as access:
        assert (await probed(access)).failure is None


@pytest.mark.parametrize("through", ["service", "proxy"])
async def test_a_redirect_is_not_followed(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return await model(request)

    async with http_server(elsewhere) as port:

        async def redirect(request: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{port}{request.path}")

        async with service(redirect, monkeypatch) if through == "service" else proxy(redirect) as access:
            reason, message = failure(await probed(access))
    assert asked == []
    assert reason == "ServiceUnreachable"
    assert "HTTP 307" in message


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * (1 << 16))


@pytest.mark.parametrize("through", ["service", "proxy"])
async def test_an_endless_answer_is_cut_off(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(endless, monkeypatch) if through == "service" else proxy(endless) as access:
        reason, message = failure(await probed(access))
    assert reason == "ServiceUnreachable"
    assert "answered more than 1024 KiB" in message


async def test_an_answer_that_trickles_ends_with_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    monkeypatch.setattr(service_probe, "READY_TIMEOUT_SECONDS", 0.2)
    async with service(trickle, monkeypatch) as access:
        reason, message = failure(await probed(access))
    assert reason == "ServiceUnreachable"
    assert "gave no answer within" in message


ODD: dict[str, Any] = {
    "deeply nested": b"[" * 200_000,
    "compressed": b"\x1f\x8b\x08\x00",
    "not UTF-8": b'{"phase": "\xff"}',
    "a list": b"[1]",
    "nothing": b"",
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
@pytest.mark.parametrize("through", ["service", "proxy"])
async def test_what_is_no_json_object_is_no_answer(through: str, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def odd(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    async with service(odd, monkeypatch) if through == "service" else proxy(odd) as access:
        reason, message = failure(await probed(access))
    assert reason in ("ServiceUnreachable", "WrongAnswer")
    assert "\n" not in message


@pytest.mark.parametrize("usage", [None, [], "many", {"completion_tokens": "1"}, {"completion_tokens": None}])
async def test_a_completion_without_a_count_of_one_token_is_wrong(usage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(READY if request.path == "/ready" else {**TOKEN, "usage": usage})

    async with service(answer, monkeypatch) as access:
        assert failure(await probed(access))[0] == "WrongAnswer"


# With authentication


async def guarded(request: web.Request) -> web.StreamResponse:
    """A model that asks for an API key, and not for its readiness."""
    if not request.path.endswith("/ready") and request.headers.get("Authorization") != f"Bearer {KEY.value}":
        return web.json_response({"error": {"message": "This server needs an API key."}}, status=401)
    return await model(request)


async def test_a_model_that_asks_for_a_key_is_asked_with_the_operators_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with service(guarded, monkeypatch) as access:
        assert (await probed(access, KEY)).failure is None
        reason, message = failure(await probed(access, ProbeKey("another-key")))
        assert (await probed(access)).failure is not None
    assert reason == "ServiceUnreachable"
    assert "HTTP 401" in message
    assert "API key" in message
    assert str(KEY.value) not in repr(KEY)
    for secret in (str(KEY.value), "another-key"):
        assert secret not in message + caplog.text


async def test_the_key_is_for_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/ready` is open, so another program behind the Service does not get the key before it shows the hash."""
    seen: list[str] = []

    async def other(request: web.Request) -> web.StreamResponse:
        seen.extend(request.headers.getall("Authorization", []))
        return web.json_response({"config_hash": "another"})

    async with service(other, monkeypatch) as access:
        assert failure(await probed(access, KEY))[0] == "WrongAnswer"
    assert seen == []


async def test_a_model_behind_the_proxy_that_asks_for_a_key_is_not_a_refused_login() -> None:
    logins: list[None] = []
    async with proxy(guarded, lambda: logins.append(None)) as access:
        reason, message = failure(await probed(access, KEY))
    assert len(logins) == 1, "the pod's 401 is not the API server's"
    assert reason == "ServiceUnreachable"
    assert "proxy does not pass on" in message
