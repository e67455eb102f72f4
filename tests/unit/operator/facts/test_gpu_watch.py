"""Nodes and pods of a whole cluster over real HTTP: listed, then watched; without rights, planned without."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import kopf
import pytest
from aiohttp import web

from millstream_operator.api.load import parse
from millstream_operator.facts import gpu_watch
from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.facts.gpu_watch import GpuWatch
from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.index import Index
from millstream_operator.kube.kinds import NODE, POD
from tests.support.fake_api_server import FakeApiServer
from tests.support.fake_cluster import FakeCluster, FakeClusterClient, Fault
from tests.support.gpu_nodes import L4, gpu_node, gpu_pod, spec_on_gpu
from tests.support.llmdeployments import manifest

PATIENCE_SECONDS = 60.0
OWNER = parse(manifest(**spec_on_gpu()))


class World:
    """A fake API server, and a facts that a watch keeps."""

    def __init__(self, server: FakeApiServer, url: str) -> None:
        self.server = server
        self.client = ClusterClient(lambda: kopf.ConnectionInfo(server=url))
        self.facts = ClusterFacts(Index())
        self.watch = GpuWatch(self.facts)

    def free(self) -> int:
        inventory = self.facts.of(OWNER).inventory
        return sum(kind.gpus * kind.nodes for kind in inventory.kinds) if inventory is not None else 0

    async def eventually(self, look: Callable[[], object]) -> None:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not look():
            assert time.monotonic() < give_up
            await asyncio.sleep(0.02)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(gpu_watch, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(gpu_watch, "FORBIDDEN_RETRY_SECONDS", 0.05)
    server = FakeApiServer()
    runner, url = await server.start()
    one = World(server, url)
    yield one
    await one.client.close()
    server.away = True
    await runner.cleanup()


@contextlib.asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.watch.run(world.client))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_there_is_listed_and_what_happens_is_watched(world: World) -> None:
    world.server.put(NODE, gpu_node("a", L4, 4))
    world.server.put(POD, gpu_pod("p", "a", 1))
    await world.watch.list(world.client, 0.0)
    assert world.free() == 3
    async with running(world):
        world.server.put(NODE, gpu_node("b", L4, 8))
        await world.eventually(lambda: world.free() == 11)
        world.server.put(POD, gpu_pod("q", "b", 2))
        await world.eventually(lambda: world.free() == 9)
        world.server.remove(POD, "team", "p")
        await world.eventually(lambda: world.free() == 10)
        world.server.remove(NODE, "", "b")
        await world.eventually(lambda: world.free() == 4)


async def test_an_api_server_that_goes_away_and_comes_back_is_watched_on(world: World) -> None:
    world.server.put(NODE, gpu_node("a", L4, 4))
    await world.watch.list(world.client, 0.0)
    async with running(world):
        world.server.put(NODE, gpu_node("b", L4, 1))
        await world.eventually(lambda: world.free() == 5)
        world.server.away = True
        await asyncio.sleep(0.3)
        world.server.put(NODE, gpu_node("c", L4, 2))
        assert world.free() == 5, "what was known stays"
        world.server.away = False
        await world.eventually(lambda: world.free() == 7)


async def test_a_version_that_the_server_has_forgotten_is_listed_anew(world: World) -> None:
    world.server.put(NODE, gpu_node("a", L4, 4))
    await world.watch.list(world.client, 0.0)
    world.server.remove(NODE, "", "a")
    world.server._history.clear()  # the deletion is never delivered
    expired = {"code": 410, "metadata": {"resourceVersion": str(world.server.version + 1)}}
    world.server._tell(NODE, "ERROR", expired)
    async with running(world):
        await world.eventually(lambda: world.free() == 0)


async def test_only_pods_that_hold_something_are_asked_for(world: World) -> None:
    asked: list[str] = []
    listing = world.server._list

    async def listen(kind: Any, request: web.Request) -> web.StreamResponse:
        asked.append(f"{kind.plural} {request.query.get('fieldSelector', '')}")
        return await listing(kind, request)

    world.server._list = listen  # type: ignore[method-assign]
    runner, url = await world.server.start()
    client = ClusterClient(lambda: kopf.ConnectionInfo(server=url))
    await world.watch.list(client, 0.0)
    await client.close()
    await runner.cleanup()
    assert asked == ["nodes ", "pods spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"]


# Rights


async def test_without_rights_there_is_a_problem_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    cluster, facts = FakeCluster(), ClusterFacts(Index())
    cluster.put(gpu_node("a"))
    forbidden = ApiError(403, "Forbidden", "nodes is forbidden")
    watch = GpuWatch(facts)
    await watch.list(FakeClusterClient(cluster, Fault(0, forbidden, writes_only=False)), 0.0)
    assert facts.problem is not None
    assert "nodes is forbidden" in facts.problem
    assert facts.of(OWNER).inventory is None
    assert caplog.text.count("Plans are made from specs alone") == 1
    await watch.list(FakeClusterClient(cluster), gpu_watch.RELIST_SECONDS + 1)
    assert facts.of(OWNER).inventory is not None, "the right was granted"


async def test_pods_that_may_not_be_seen_make_the_nodes_useless() -> None:
    """All GPUs would look free."""
    cluster, facts = FakeCluster(), ClusterFacts(Index())
    cluster.put(gpu_node("a"))
    forbidden = ApiError(403, "Forbidden", "pods is forbidden")
    await GpuWatch(facts).list(FakeClusterClient(cluster, Fault(1, forbidden, writes_only=False)), 0.0)
    assert facts.of(OWNER).inventory is None


async def test_a_listing_is_not_made_again_at_every_resync() -> None:
    cluster, watch = FakeCluster(), GpuWatch(ClusterFacts(Index()))
    client = FakeClusterClient(cluster)
    await watch.list(client, 0.0)
    asked = len(client.requests)
    await watch.list(client, 300.0)
    assert len(client.requests) == asked
    await watch.list(client, gpu_watch.RELIST_SECONDS)
    assert len(client.requests) == 2 * asked


async def test_a_disabled_inventory_lists_nothing() -> None:
    facts = ClusterFacts(Index())
    watch, client = GpuWatch(facts, enabled=False), FakeClusterClient(FakeCluster())
    await watch.list(client, 0.0)
    await watch.run(client)
    assert client.requests == []
    assert "MILLSTREAM_INVENTORY" in (facts.problem or "")
