"""The fence, with the real client and a real HTTP server: what leaves, for how long, and what is known afterwards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.fence import Fence, NotLeader
from millstream_operator.kube.kinds import LEASE, SERVICE

CHILD = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "demo", "namespace": "team", "uid": "u", "resourceVersion": "1"},
}


class Api:
    """Answers everything with the same object and remembers what arrived whole."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.status = 200
        self.arrived, self.hold = asyncio.Event(), asyncio.Event()
        self.hold.set()

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.requests.append(request)
        self.arrived.set()
        await self.hold.wait()
        return web.json_response(CHILD if self.status == 200 else {"message": "no"}, status=self.status)


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, str]]:
    one, app = Api(), web.Application()
    app.router.add_route("*", "/{path:.*}", one.answer)
    async with TestServer(app) as server:
        yield one, str(server.make_url("/"))
        one.hold.set()


class Clock:
    """Stands still, until its readings are used up one by one."""

    def __init__(self) -> None:
        self.now, self.readings = 0.0, list[float]()

    def __call__(self) -> float:
        if self.readings:
            self.now = self.readings.pop(0)
        return self.now


def client_of(url: str, fence: Fence) -> ClusterClient:
    return ClusterClient(lambda: kopf.ConnectionInfo(server=url), fence)


async def every_write(client: ClusterClient) -> list[Any]:
    results: list[Any] = await asyncio.gather(
        client.apply(CHILD),
        client.apply(CHILD, subresource="status"),
        client.create(CHILD),
        client.merge(SERVICE, "team", "demo", {"spec": {}}),
        client.delete(SERVICE, CHILD),
        return_exceptions=True,
    )
    return results


async def test_a_closed_fence_lets_no_write_out_and_every_read(api: tuple[Api, str]) -> None:
    server, url = api
    fence = Fence()
    fence.close()
    client = client_of(url, fence)
    results = await every_write(client)
    assert {type(result) for result in results} == {NotLeader}
    assert server.requests == []
    assert await client.get(SERVICE, "team", "demo") == CHILD
    lease = {"metadata": {"name": "l", "namespace": "system"}}
    await client.put(LEASE, lease, create=True)
    assert [request.method for request in server.requests] == ["GET", "POST"], "the Lease is what the fence stands on"
    await client.close()


async def test_an_open_fence_lets_writes_out_with_a_time_limit_for_the_server(api: tuple[Api, str]) -> None:
    server, url = api
    clock = Clock()
    fence = Fence(clock)
    fence.open(write_until=10.0, over_by=14.0)
    clock.now = 9.5
    client = client_of(url, fence)
    assert not [result for result in await every_write(client) if isinstance(result, BaseException)]
    assert {request.query["timeout"] for request in server.requests} == {"4500ms"}
    clock.now = 10.0
    assert {type(result) for result in await every_write(client)} == {NotLeader}
    assert len(server.requests) == 5
    assert fence.quiet()
    await client.close()


async def test_a_write_whose_time_ran_out_while_it_waited_does_not_leave(api: tuple[Api, str]) -> None:
    """The loop may be busy, or the connections all taken, between the first look at the clock and the last."""
    server, url = api
    clock = Clock()
    fence = Fence(clock)
    fence.open(write_until=10.0, over_by=14.0)
    client = client_of(url, fence)
    clock.readings = [9.0, 9.0, 20.0]  # may it begin; how long; may its body leave
    with pytest.raises(NotLeader):
        await client.apply(CHILD)
    assert server.requests == []
    assert fence.quiet(), "what never left cannot arrive"
    await client.close()


async def test_an_unanswered_write_may_still_be_carried_out_for_as_long_as_the_server_was_given(
    api: tuple[Api, str],
) -> None:
    server, url = api
    clock = Clock()
    fence = Fence(clock)
    fence.open(write_until=10.0, over_by=10.2)
    clock.now = 9.9
    client = client_of(url, fence)
    server.hold.clear()
    with pytest.raises(ApiUnreachable):
        await client.apply(CHILD)
    assert len(server.requests) == 1
    assert fence.in_flight == 0
    assert not fence.quiet()
    clock.now = 10.3
    assert fence.quiet()
    await client.close()


async def test_a_cancelled_write_is_unanswered_and_a_refused_one_is_not(api: tuple[Api, str]) -> None:
    server, url = api
    fence = Fence()
    client = client_of(url, fence)
    server.status = 409
    with pytest.raises(ApiError):
        await client.apply(CHILD)
    assert fence.quiet()
    server.hold.clear()
    server.arrived.clear()
    task = asyncio.create_task(client.apply(CHILD))
    await server.arrived.wait()
    assert fence.in_flight == 1
    assert not await fence.wait_idle(0.06)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await fence.wait_idle(1.0)
    assert not fence.quiet()
    await client.close()


def test_who_runs_alone_has_no_fence() -> None:
    fence = Fence()
    with fence.write(15.0) as permit:
        assert permit.seconds == 15.0
        permit.answered = True
    fence.open(math.inf, math.inf)
    fence.check()
