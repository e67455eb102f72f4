"""Two real operator processes and a fake API server: one writes, the other is ready to, and a signal hands over.

What is asserted about time is only that things come true; the bounds are the simulation's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from millstream_operator.kube.kinds import LEASE, LLM_DEPLOYMENT, SERVICE
from tests.support.fake_api_server import FakeApiServer, write_kubeconfig
from tests.support.reserved_port import reserved_port

pytestmark = pytest.mark.deep

PATIENCE_SECONDS = 60.0
LLMD = {
    "apiVersion": LLM_DEPLOYMENT.api_version,
    "kind": LLM_DEPLOYMENT.kind,
    "metadata": {"name": "demo", "namespace": "team"},
    "spec": {
        "model": {"servedName": "demo", "source": {"local": {"path": "demo-chat"}}},
        "accelerator": {"type": "CPU"},
        "replicas": 0,
    },
}


class Replica:
    """An operator's process, as the chart starts it but for its surroundings."""

    def __init__(self, kubeconfig: Path, port: int) -> None:
        self.port = port
        self._environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "MILLSTREAM_RUNTIME_IMAGE": "registry/runtime:1",
            "MILLSTREAM_HEALTH_PORT": str(self.port),
            "MILLSTREAM_OPERATOR_NAMESPACE": "system",
        }

    async def start(self) -> Replica:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "millstream_operator", env=self._environment, stderr=asyncio.subprocess.DEVNULL
        )
        return self

    async def ask(self, path: str) -> tuple[int, str]:
        """Status and text; (0, "") while it does not listen."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}{path}") as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError:
            return 0, ""

    async def leads(self) -> bool:
        return "millstream_operator_leader 1.0" in (await self.ask("/metrics"))[1]

    async def ready(self) -> bool:
        return (await self.ask("/readyz"))[0] == 200

    async def end(self) -> int:
        """By the signal that a pod gets."""
        self.process.terminate()
        return await self.process.wait()


async def eventually(look: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while True:
        seen = look()
        if await seen if asyncio.iscoroutine(seen) else seen:
            return
        assert time.monotonic() < give_up, f"not {what}"
        await asyncio.sleep(0.1)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[FakeApiServer, Callable[[], Replica]]]:
    api = FakeApiServer()
    runner, url = await api.start()
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", url)
    replicas: list[Replica] = []

    with contextlib.ExitStack() as ports:

        def new() -> Replica:
            replicas.append(Replica(kubeconfig, ports.enter_context(reserved_port())))
            return replicas[-1]

        yield api, new
        for replica in replicas:
            if replica.process.returncode is None:
                replica.process.kill()
                await replica.process.wait()
    await runner.cleanup()


async def test_one_writes_the_other_stands_by_and_a_signal_hands_over(
    world: tuple[FakeApiServer, Callable[[], Replica]],
) -> None:
    api, new = world
    api.put(LLM_DEPLOYMENT, LLMD)
    first = await new().start()
    await eventually(first.leads, "the first leads")
    await eventually(lambda: api.names(SERVICE) == {"demo"}, "children")
    second = await new().start()
    await eventually(second.ready, "the standby is ready")
    assert not await second.leads()
    (leader,) = api.writers()
    assert api.listings[leader, SERVICE.kind] == 1, "the Lease was free: what it listed is what the last one left"

    # A child is repaired by the leader alone.
    api.remove(SERVICE, "team", "demo")
    await eventually(lambda: api.names(SERVICE) == {"demo"}, "repaired by the leader")
    assert len(api.writers()) == 1

    # An API server that is away is no reason to restart, and when it is back the work goes on.
    api.away = True
    await asyncio.sleep(3.0)
    assert (await first.ask("/healthz"))[0] == 200
    api.away = False
    api.remove(SERVICE, "team", "demo")
    await eventually(lambda: api.names(SERVICE) == {"demo"}, "repaired after the outage")
    assert first.process.returncode is None
    assert len(api.writers()) == 1

    # A signal ends the leader, which gives the Lease up: the other one leads at once, and the first writes no more.
    assert await first.end() == 0
    await eventually(second.leads, "the second leads")
    api.remove(SERVICE, "team", "demo")
    await eventually(lambda: api.names(SERVICE) == {"demo"}, "repaired by the second")
    assert len(api.writers()) == 2, "first the one, then the other"
    assert api.listings[api.writers()[-1], SERVICE.kind] == 2, "once to stand by, and once more to lead"
    assert api.objects[LEASE.kind, "system", "millstream"]["spec"]["leaseTransitions"] == 1

    assert await second.end() == 0
    lease = api.objects[LEASE.kind, "system", "millstream"]["spec"]
    assert (lease.get("holderIdentity", ""), lease["leaseDurationSeconds"]) == ("", 1), "given up"


async def test_a_signal_before_the_first_listing_is_done_gives_the_lease_up(
    world: tuple[FakeApiServer, Callable[[], Replica]],
) -> None:
    """Else the next one would wait until it runs out: kopf, which hears signals, has not started yet."""
    api, new = world
    api.lists.clear()
    early = await new().start()
    await eventually(lambda: sum(api.listings.values()), "it lists")
    lease = api.objects[LEASE.kind, "system", "millstream"]
    assert lease["spec"]["holderIdentity"], "a free Lease is acquired first"
    assert await early.end() == 0
    lease = api.objects[LEASE.kind, "system", "millstream"]
    assert (lease["spec"].get("holderIdentity", ""), lease["spec"]["leaseDurationSeconds"]) == ("", 1)
