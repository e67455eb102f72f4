"""Two releases over the same LLMDeployments: the first manages them, and the second writes nothing to any of them.

    first release:   makes the objects Ready, and records itself in status.managedBy
    second release:  starts with other settings, sees all of them -> one Event each, and no other write
    meanwhile:       each object is changed once, so that there is something to write

The proof is the API server's audit log, in which each release names itself. Without an owner both would write each
other's changes back for as long as they run, so the first one's writes at rest are counted as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from tests.soak import audit
from tests.soak.api import eventually, is_ready, llmd, llmd_path
from tests.soak.experiments import spec_a
from tests.soak.load import for_each
from tests.soak.operator_process import OperatorProcess
from tests.soak.progress import Say, silent
from tests.soak.world import World

Result = dict[str, Any]
READY_SECONDS, SETTLED_SECONDS, TOGETHER = 600.0, 10.0, 4
LEASE_NAME = "millstream"
METRIC = "millstream_operator_managed_by_another"
# What makes their children differ, as of two charts: both would otherwise render the same and never fight.
SECOND = {"MILLSTREAM_RUNTIME_IMAGE": "registry.example.com/other-runtime:soak"}


async def two_releases(world: World, *, objects: int, seconds: float, say: Say = silent) -> Result:
    """Count the writes of both over `seconds`, in the middle of which each of the `objects` is changed once."""
    await world.delete_llmdeployments()
    namespace = await world.namespace("shared")
    names = [f"llm-{number:02}" for number in range(objects)]
    first_namespace, second_namespace = await world.namespace("first"), await world.namespace("second")
    began = time.time()
    async with OperatorProcess(world.plane, "first", _settings(first_namespace)) as first:
        await first.wait_leading()

        async def create(name: str) -> None:
            await world.admin.create(llmd_path(namespace), llmd(name, spec_a() | {"replicas": 1}))

        await for_each(names, create, TOGETHER)
        await _all_ready(world, namespace, objects)
        pods = await _pods(world, namespace)
        say(f"{objects} are Ready under the first release")
        async with OperatorProcess(world.plane, "second", _settings(second_namespace) | SECOND) as second:
            await second.wait_leading()
            left = await eventually(
                lambda: _left_to_others(second),
                lambda count: count >= objects,
                what="all left to the first release",
                seconds=READY_SECONDS,
            )
            await asyncio.sleep(SETTLED_SECONDS)
            at_rest = time.time()
            await asyncio.sleep(seconds / 2)
            changed = time.time()
            await for_each(names, lambda name: _change(world, namespace, name), TOGETHER)
            await _all_ready(world, namespace, objects)
            await asyncio.sleep(seconds / 2)
            owners = await _owners(world, namespace)
            pods_before = "serve on" if await _pods(world, namespace) == pods else "were replaced"
            crashes = first.crashes + second.crashes
    writes = [one for one in audit.read(world.plane.audit_log) if one.received >= began and one.status < 300]
    second_writes = _written_by_holder_of(writes, second_namespace)
    first_at_rest = [one for one in _written_by_holder_of(writes, first_namespace) if at_rest <= one.received < changed]
    return {
        "objects": objects,
        "seconds": seconds,
        "left_to_others": left,
        "events_of_the_second": sum(one.resource == "events" for one in second_writes),
        "writes_of_the_second": [_in_words(one) for one in second_writes if one.resource != "events"],
        "writes_of_the_first_at_rest": [_in_words(one) for one in first_at_rest if one.resource != "events"],
        "owners": owners,
        "owner": f"{first_namespace}/{LEASE_NAME}",
        "pods_before_the_change": pods_before,
        "crashes": crashes,
    }


def _settings(namespace: str) -> dict[str, str]:
    return {
        "MILLSTREAM_LEADER_ELECTION": "Enabled",
        "MILLSTREAM_LEASE_NAME": LEASE_NAME,
        "MILLSTREAM_OPERATOR_NAMESPACE": namespace,
        "MILLSTREAM_RECHECK_SECONDS": "2",
    }


def _written_by_holder_of(writes: list[audit.Write], namespace: str) -> list[audit.Write]:
    """All but those of Leases, by whoever wrote the Lease of a release in this namespace."""
    agents = {one.agent for one in writes if one.about_lease and one.namespace == namespace}
    return [one for one in writes if one.agent in agents and not one.about_lease]


def _in_words(write: audit.Write) -> str:
    return f"{write.verb} {write.resource} {write.namespace}/{write.name}"


async def _left_to_others(operator: OperatorProcess) -> int:
    return int((await operator.metrics()).get(METRIC, 0))


async def _change(world: World, namespace: str, name: str) -> None:
    await world.admin.merge(llmd_path(namespace, name), {"spec": {"service": {"port": 8080}}})


async def _all_ready(world: World, namespace: str, objects: int) -> None:
    async def ready() -> int:
        return sum(map(is_ready, await world.admin.items(llmd_path(namespace))))

    await eventually(ready, lambda count: count >= objects, what="all Ready", seconds=READY_SECONDS, pause_seconds=1)


async def _owners(world: World, namespace: str) -> dict[str, int]:
    """How many objects `status.managedBy` gives to which release."""
    found = [one["status"]["managedBy"] for one in await world.admin.items(llmd_path(namespace))]
    return dict(Counter(f"{one['namespace']}/{one['name']}" for one in found))


async def _pods(world: World, namespace: str) -> list[str]:
    return sorted(one["metadata"]["uid"] for one in await world.admin.items(f"/api/v1/namespaces/{namespace}/pods"))
