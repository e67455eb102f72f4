"""Clusters as today's operator leaves them: the whole of what is stored, taken in the middle of a story or at its end.

The stories run again only to write the files; the tests read records/clusters/NAME.json.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT, POD
from millstream_operator.rollout.revisions import pinned
from millstream_operator.rollout.rollout import RolloutInput
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.gpu_nodes import L4, T4, gpu_node, spec_on_gpu
from tests.support.llmdeployments import manifest
from tests.support.rollout_world import World, image, served
from tests.unit.operator.upgrade.stored_deployments import RECORDS, read

Manifest = dict[str, Any]
CLUSTERS = RECORDS / "clusters"
FOLLOW = {"updatePolicy": "FollowOperator"}


def stored_cluster(name: str) -> FakeCluster:
    """A cluster with these objects in it, as they were."""
    cluster = FakeCluster()
    for one in read(CLUSTERS / f"{name}.json"):
        cluster.objects[one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]] = one
    return cluster


def journal_of(cluster: FakeCluster) -> list[Manifest]:
    found: list[Manifest] = cluster.the(LLM_DEPLOYMENT)["status"]["decisions"]
    return found


def owner_of(cluster: FakeCluster) -> LLMDeployment:
    return parse({key: value for key, value in cluster.the(LLM_DEPLOYMENT).items() if key != "status"})


def inputs_of(cluster: FakeCluster) -> RolloutInput:
    """What a rollout is decided from, by the next operator."""
    owner, records = owner_of(cluster), cluster.all(CONTROLLER_REVISION)
    pin = pinned(owner, records)
    assert pin is not None
    return RolloutInput(owner, pin, records, cluster.the(DEPLOYMENT), cluster.all(POD), journal_of(cluster))


# The stories


async def _rolled_out() -> FakeCluster:
    one = await served("ResourceAware", replicas=2)
    await one.apply(**image("better"))
    return one.cluster


async def _rolled_back() -> FakeCluster:
    one = await served("ResourceAware", replicas=2)
    await one.apply(**image("bad"))
    return one.cluster


async def _stopped() -> FakeCluster:
    one = await served("Availability", replicas=2)
    await one.apply(**image("bad"))
    return one.cluster


async def _replacing_in_place() -> FakeCluster:
    """Announced, and the old pods still serve."""
    return await _when_first_decided(await served("ResourceAware", replicas=2))


async def _replacing_in_place_of_auto() -> FakeCluster:
    """Its surge found no GPU: the strategy that was chosen is a mark of the record."""
    return await _when_first_decided(await served(replicas=2, gpus=2, accelerator={"type": "GPU"}))


async def _when_first_decided(one: World) -> FakeCluster:
    """As the cluster was in the turn that announced how a better image comes."""
    taken: list[FakeCluster] = []

    def seen(world: World) -> None:
        if world.decisions and not taken:
            taken.append(copy.deepcopy(world.cluster))

    respec(one.cluster, **image("better"))
    await one.settle(seen)
    return taken[0]


async def _adopted() -> FakeCluster:
    return (await _upgraded("better")).cluster


async def _adopted_and_failed() -> FakeCluster:
    return (await _upgraded("bad")).cluster


async def _upgraded(default_image: str) -> World:
    """FollowOperator: another operator, with another default image, took over."""
    one = World(world(manifest(runtime=FOLLOW)))
    one.operator = FakeOperator(one.cluster, image="good")
    await one.settle()
    one.operator = FakeOperator(one.cluster, image=default_image)
    await one.settle()
    return one


async def _adopted_gpus() -> FakeCluster:
    """FollowOperator: a cheaper GPU came."""
    operator = FakeOperator(world(manifest(**spec_on_gpu(runtime=FOLLOW))))
    operator.cluster.put(gpu_node("a", L4))
    await operator.settle()
    operator.cluster.put(gpu_node("b", T4))
    await operator.settle()
    return operator.cluster


STORIES: dict[str, Callable[[], Awaitable[FakeCluster]]] = {
    "rolled-out": _rolled_out,
    "rolled-back": _rolled_back,
    "stopped": _stopped,
    "replacing-in-place": _replacing_in_place,
    "replacing-in-place-of-auto": _replacing_in_place_of_auto,
    "adopted": _adopted,
    "adopted-and-failed": _adopted_and_failed,
    "adopted-gpus": _adopted_gpus,
}
