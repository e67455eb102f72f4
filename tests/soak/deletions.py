"""Deletions while no garbage collector runs: what is deleted stops serving, and what asked for orphans serves on.

    no collector:  deleted while the operator is away, many at once, in the foreground, and made again
                   -> no pods, each Deployment written once and still there; one that asked for orphans keeps its pods
    a collector:   -> only what was made again is left, with a Deployment of its own; orphans keep their pods

The control plane begins without a collector: one that is behind for ever. It is started for the second half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tests.soak.api import Object, eventually, is_ready, llmd, llmd_path
from tests.soak.experiments import spec_a
from tests.soak.load import for_each
from tests.soak.operator_process import OperatorProcess
from tests.soak.progress import Say, silent
from tests.soak.world import OPERATOR_NAMESPACE, World

Result = dict[str, Any]
TOGETHER = 16
NAMESPACE = "deleted"
READY_SECONDS, STOPPED_SECONDS, COLLECTED_SECONDS = 1800.0, 600.0, 1800.0
AWAY, AHEAD, AGAIN, WAITING, ORPHANED = "while-away", "ahead", "again", "waiting-for-orphans", "orphaned"
SETTLED_SECONDS = 2.0
SETTINGS = {
    "MILLSTREAM_LEADER_ELECTION": "Enabled",
    "MILLSTREAM_LEASE_NAME": "deletions",
    "MILLSTREAM_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
}


def one_replica() -> Object:
    return spec_a() | {"replicas": 1}


@dataclass
class Deletions:
    """One run. `objects`: LLMDeployments that are deleted at once."""

    world: World
    objects: int
    say: Say
    result: Result = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    async def run(self) -> Result:
        await self.world.admin.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        many = [f"llm-{number:04}" for number in range(self.objects)]
        async with OperatorProcess(self.world.plane, "deletions", SETTINGS) as operator:
            self.operator = operator
            await operator.wait_leading()
            await self._create([*many, AWAY, AHEAD, AGAIN, WAITING, ORPHANED])
            await self._delete_without_operator()
            await self._delete_without_collector(many)
            await self._collect()
            await self._orphan()
            self.result |= {"crashes": operator.crashes, "problems": self.problems}
        return self.result

    async def _create(self, names: Collection[str]) -> None:
        async def create(name: str) -> None:
            await self.world.admin.create(llmd_path(NAMESPACE), llmd(name, one_replica()))

        async def ready() -> int:
            return sum(map(is_ready, await self.world.admin.items(llmd_path(NAMESPACE))))

        await for_each(names, create, TOGETHER)
        await eventually(
            ready, lambda count: count >= len(names), what="all Ready", seconds=READY_SECONDS, pause_seconds=1
        )
        self.say(f"{len(names)} are Ready")

    async def _delete_without_operator(self) -> None:
        await self.operator.stop()
        await self._delete(AWAY)
        self.operator.start_again()
        await self._until_pods_of_only_others({AWAY})

    async def _delete_without_collector(self, many: list[str]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._delete(AHEAD, "Foreground")
        await self._delete(WAITING, "Orphan")
        await self._delete(AGAIN)
        await self.world.admin.create(llmd_path(NAMESPACE), llmd(AGAIN, one_replica()))
        deleted_seconds = await for_each(many, self._delete, TOGETHER)
        stopped = {AWAY, AHEAD, AGAIN, *many}
        await self._until_pods_of_only_others(stopped)
        self.result |= {
            "objects": self.objects,
            "deleted_seconds": round(deleted_seconds, 1),
            "pods_ended_seconds": round(loop.time() - began, 1),
        }
        self.say(f"no pods after {self.result['pods_ended_seconds']} s")
        await asyncio.sleep(SETTLED_SECONDS)
        deployments = {one["metadata"]["name"]: one for one in await self._items("deployments")}
        self._expect("Deployments that wait for the collector", stopped - deployments.keys(), set())
        running = {name for name, one in deployments.items() if one["spec"]["replicas"]}
        self._expect("Deployments that ask for pods", running, {WAITING, ORPHANED})
        writes = [x for x in self.operator.proxy.writes(began) if x.asked.resource == "deployments" and x.status < 300]
        self.result["writes_per_deployment"] = round(len(writes) / (len(stopped) - 1), 2)  # one of them was before
        self._expect("pods of orphans to be", len(await self._pods_of({WAITING})), 1)

    async def _collect(self) -> None:
        self.world.plane.start_collector()
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def left() -> set[str]:
            names = {one["metadata"]["name"] for one in await self._items("deployments")}
            again = await self.world.admin.request("GET", llmd_path(NAMESPACE, AGAIN))
            # Whether the collector knows all children of a deletion that it finds at its start is not ours to say.
            return (names - {WAITING}) | ({"not Ready"} if not is_ready(again) else set())

        await eventually(
            left,
            lambda found: found == {AGAIN, ORPHANED},
            what="collected, and the one that was made again Ready",
            seconds=COLLECTED_SECONDS,
            pause_seconds=1,
        )
        self.result["collected_seconds"] = round(loop.time() - began, 1)
        successor = await self.world.admin.request("GET", llmd_path(NAMESPACE, AGAIN))
        self._expect("the successor's Deployment", await self._owners_of(AGAIN), [successor["metadata"]["uid"]])
        self._expect("pods of the successor", len(await self._pods_of({AGAIN})), 1)

    async def _orphan(self) -> None:
        before = await self._pods_of({ORPHANED})
        await self._delete(ORPHANED, "Orphan")
        await eventually(
            lambda: self.world.admin.get(llmd_path(NAMESPACE, ORPHANED)),
            lambda found: found is None,
            what="orphaned",
            seconds=STOPPED_SECONDS,
        )
        await asyncio.sleep(SETTLED_SECONDS)
        self._expect("owners of an orphan", await self._owners_of(ORPHANED), [])
        self._expect("pods of an orphan", await self._pods_of({ORPHANED}), before)

    async def _delete(self, name: str, policy: str = "Background") -> None:
        await self.world.admin.delete(llmd_path(NAMESPACE, name), policy)

    async def _until_pods_of_only_others(self, names: Collection[str]) -> None:
        await eventually(
            lambda: self._pods_of(names),
            lambda found: not found,
            what="without pods",
            seconds=STOPPED_SECONDS,
            pause_seconds=0.5,
        )

    async def _pods_of(self, names: Collection[str]) -> list[str]:
        """Uids of the pods of these LLMDeployments."""
        return sorted(
            one["metadata"]["uid"]
            for one in await self._items("pods")
            if one["metadata"]["labels"].get("millstream.dev/deployment") in names
        )

    async def _owners_of(self, name: str) -> list[str]:
        found = [one for one in await self._items("deployments") if one["metadata"]["name"] == name]
        return [owner["uid"] for one in found for owner in one["metadata"].get("ownerReferences") or ()]

    async def _items(self, plural: str) -> list[Object]:
        group = "/api/v1" if plural == "pods" else "/apis/apps/v1"
        return await self.world.admin.items(f"{group}/namespaces/{NAMESPACE}/{plural}")

    def _expect(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            self.problems.append(f"{what}: {found}, and not {wanted}"[:500])


async def deletions(world: World, *, objects: int, say: Say = silent) -> Result:
    """The whole run, on a control plane without a collector."""
    return await Deletions(world, objects, say).run()
