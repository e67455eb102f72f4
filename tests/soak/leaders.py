"""Two operators, one Lease: the leader is killed, frozen, cut off; another takes over, and never do both write.

The proof is the API server's audit log. Every replica names itself in its user agent, and LLMDeployments are changed
all the time, so that there is always something to write.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.soak import audit
from tests.soak.api import Refused, TooSlow, eventually, llmd, llmd_path
from tests.soak.experiments import spec_a
from tests.soak.operator_process import OperatorProcess
from tests.soak.world import OPERATOR_NAMESPACE, World

Result = dict[str, Any]
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/leaders"
SETTINGS = {
    "MILLSTREAM_LEADER_ELECTION": "Enabled",
    "MILLSTREAM_LEASE_NAME": "leaders",
    "MILLSTREAM_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
}
OBJECTS = 8
AWAY_SECONDS = 30.0  # longer than a Lease lasts, so that another leads when the old one comes back
TAKEOVER_LIMIT_SECONDS = 60.0


@dataclass
class Pair:
    """Two replicas and the load on them."""

    world: World
    one: OperatorProcess
    other: OperatorProcess
    namespace: str

    async def leader(self) -> OperatorProcess:
        """The replica that says it leads, when the Lease is held."""

        async def look() -> OperatorProcess | None:
            for replica in (self.one, self.other):
                with suppress(Exception):
                    if (await replica.metrics()).get("millstream_operator_leader") == 1:
                        return replica
            return None

        found = await eventually(look, lambda x: x is not None, what="a leader", seconds=TAKEOVER_LIMIT_SECONDS)
        assert found is not None
        return found

    async def churn(self) -> None:
        """Change every LLMDeployment, again and again."""
        number = 0
        while True:
            number += 1
            for index in range(OBJECTS):
                change = {"spec": {"engine": {"maxModelLen": 1024 + number % 512}, "replicas": 0}}
                with suppress(Refused):
                    await self.world.admin.merge(llmd_path(self.namespace, f"busy-{index}"), change)
            await asyncio.sleep(0.2)


async def leaders(world: World, *, rounds: int, ways: tuple[str, ...] = ("killed", "frozen", "cut off")) -> Result:
    """Each way of losing a leader, `rounds` times over."""
    began = time.time()
    namespace = await world.namespace("busy")
    takeovers: dict[str, list[float]] = {way: [] for way in ways}
    problems: list[str] = []
    async with (
        OperatorProcess(world.plane, "replica-1", SETTINGS) as one,
        OperatorProcess(world.plane, "replica-2", SETTINGS) as other,
    ):
        pair = Pair(world, one, other, namespace)
        for index in range(OBJECTS):
            await world.admin.create(llmd_path(namespace), llmd(f"busy-{index}", spec_a() | {"replicas": 0}))
        await one.wait_ready()
        await other.wait_ready()
        churn = asyncio.create_task(pair.churn())
        for _ in range(rounds):
            for way in ways:
                try:
                    takeovers[way].append(await _lose(pair, _WAYS[way]))
                except TooSlow as error:
                    problems.append(f"{way}: {error}")
                await asyncio.sleep(3)
        churn.cancel()
        crashes = one.crashes + other.crashes
    writes = [w for w in audit.read(world.plane.audit_log) if w.received >= began]
    return {
        "takeover_seconds": takeovers,
        "slowest_takeover_seconds": max((s for all_ in takeovers.values() for s in all_), default=0.0),
        "writes": sum(not w.about_lease for w in writes),
        "terms": len(audit.terms(writes)),
        "writes_out_of_turn": audit.writes_out_of_turn(writes),
        "crashes": crashes,
        "problems": problems,
    }


async def _lose(pair: Pair, lose: Callable[[OperatorProcess], Awaitable[Callable[[], Awaitable[None]]]]) -> float:
    """Take the leader away; seconds from its last possible moment to the first write of the next, by the audit log."""
    leader = await pair.leader()
    await asyncio.sleep(1)
    before = _last_agent(pair.world)
    lost_at = time.time()
    bring_back = await lose(leader)

    async def look() -> audit.Write | None:
        return next(
            (
                write
                for write in audit.read(pair.world.plane.audit_log)
                if write.received > lost_at and write.agent != before and not write.about_lease
            ),
            None,
        )

    first = await eventually(look, lambda x: x is not None, what="taken over", seconds=TAKEOVER_LIMIT_SECONDS)
    await bring_back()
    assert first is not None
    return round(first.received - lost_at, 2)


def _last_agent(world: World) -> str:
    return [write.agent for write in audit.read(world.plane.audit_log) if not write.about_lease][-1]


async def _killed(leader: OperatorProcess) -> Callable[[], Awaitable[None]]:
    leader.kill()
    return leader.wait_ready


async def _frozen(leader: OperatorProcess) -> Callable[[], Awaitable[None]]:
    """It stands still in the middle of whatever it did, and wakes up when another has long led."""
    leader.process.signal(signal.SIGSTOP)

    async def wake() -> None:
        leader.process.signal(signal.SIGCONT)
        await asyncio.sleep(5)

    return wake


async def _cut_off(leader: OperatorProcess) -> Callable[[], Awaitable[None]]:
    away = asyncio.create_task(leader.proxy.outage(AWAY_SECONDS))

    async def back() -> None:
        await away

    return back


_WAYS = {"killed": _killed, "frozen": _frozen, "cut off": _cut_off}
