"""The fault proxy between a client and a small server: what is forwarded, refused, kept, cut, streamed, counted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from tests.soak.faults import Fault, Injection
from tests.soak.proxy import FaultProxy

PATH = "/api/v1/namespaces/team/services/demo"


@dataclass
class Upstream:
    """The API server, faked: it remembers what reached it."""

    reached: list[tuple[str, str, str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.reached.append((request.method, request.path_qs, (await request.read()).decode()))
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            for number in range(3):
                await response.write(b'{"n":%d}\n' % number)
                await asyncio.sleep(0.01)
            return response
        return web.json_response({"agent": request.headers["User-Agent"], "who": request.headers["Authorization"]})


@dataclass
class Setup:
    upstream: Upstream
    proxy: FaultProxy
    client: aiohttp.ClientSession
    killed: list[int] = field(default_factory=list)

    def at_first(self, fault: Fault) -> None:
        self.proxy.plan.injections["team"] = Injection(fault, 1)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    upstream = Upstream()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", upstream.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy = FaultProxy(f"http://127.0.0.1:{runner.addresses[0][1]}", ssl.create_default_context())
    await proxy.start()
    async with aiohttp.ClientSession(proxy.url, headers={"User-Agent": "me"}) as client:
        made = Setup(upstream, proxy, client)
        proxy.kill = lambda: made.killed.append(len(upstream.reached))
        yield made
    await proxy.stop()
    await runner.cleanup()


async def test_a_request_goes_through_whole_with_the_operators_name(setup: Setup) -> None:
    async with setup.client.patch(f"{PATH}?force=true&x=a%20b", data="{}") as answer:
        assert await answer.json() == {"agent": "me", "who": "Bearer operator"}
    assert setup.upstream.reached == [("PATCH", f"{PATH}?force=true&x=a%20b", "{}")]
    (exchange,) = setup.proxy.writes()
    assert (exchange.status, exchange.asked.namespace, exchange.asked.name) == (200, "team", "demo")


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.TOO_MANY, Fault.SERVER_ERROR])
async def test_a_refusal_never_reaches_the_server_and_comes_once(setup: Setup, fault: Fault) -> None:
    setup.at_first(fault)
    async with setup.client.get(PATH) as answer:
        assert answer.status == int(fault)
        assert (await answer.json())["kind"] == "Status"
        assert answer.headers.get("Retry-After") == ("1" if fault is Fault.TOO_MANY else None)
    assert setup.upstream.reached == []
    async with setup.client.get(PATH) as answer:
        assert answer.status == 200


async def test_a_timeout_keeps_the_request_until_the_client_gives_up(setup: Setup) -> None:
    setup.at_first(Fault.TIMEOUT)
    with pytest.raises(TimeoutError):
        await setup.client.get(PATH, timeout=aiohttp.ClientTimeout(total=0.2))
    assert setup.upstream.reached == []


async def test_a_lost_answer_is_of_a_request_that_was_carried_out(setup: Setup) -> None:
    setup.at_first(Fault.LOST_ANSWER)
    with pytest.raises(aiohttp.ClientError):
        await setup.client.patch(PATH, data="{}")
    assert [method for method, _, _ in setup.upstream.reached] == ["PATCH"]


@pytest.mark.parametrize(("fault", "carried_out"), [(Fault.KILLED_BEFORE, 0), (Fault.KILLED_AFTER, 1)])
async def test_a_kill_comes_before_or_after_the_write(setup: Setup, fault: Fault, carried_out: int) -> None:
    setup.at_first(fault)
    with pytest.raises(aiohttp.ClientError):
        await setup.client.patch(PATH, data="{}")
    assert setup.killed == [carried_out]
    assert len(setup.upstream.reached) == carried_out


async def test_a_watch_is_passed_on_event_by_event(setup: Setup) -> None:
    async with setup.client.get("/api/v1/services?watch=true") as answer:
        lines = [line async for line in answer.content]
    assert lines == [b'{"n":0}\n', b'{"n":1}\n', b'{"n":2}\n']


async def test_in_an_outage_nobody_listens_and_afterwards_the_same_port_does(setup: Setup) -> None:
    before = setup.proxy.url
    async with setup.proxy.away():
        with pytest.raises(aiohttp.ClientError):
            await setup.client.get(PATH)
    assert setup.proxy.url == before
    async with setup.client.get(PATH) as answer:
        assert answer.status == 200
