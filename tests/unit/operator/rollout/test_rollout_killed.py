"""Killed at any write of a rollout, or through any order of changes: the end is that of a fault-free run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT, POD
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.rollout_world import World, image, served

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]


# strategy, image, replicas: the more, the more half-way states, and the longer it takes
STORIES = {
    "rollout": ("Availability", "better", 1),
    "in place": ("ResourceAware", "better", 2),
    "stopped": ("Availability", "bad", 1),
    "rolled back": ("ResourceAware", "bad", 2),
}
UNDISTURBED: dict[str, tuple[FakeCluster, dict[Any, Manifest], int]] = {}


async def undisturbed(story: str) -> tuple[FakeCluster, dict[Any, Manifest], int]:
    """A copy of the world in which the story begins, its end without a fault, and how many writes that took."""
    if story not in UNDISTURBED:
        strategy, target, replicas = STORIES[story]
        begun = await served(strategy, replicas=replicas)
        quiet = World(copy.deepcopy(begun.cluster))
        await quiet.apply(**image(target))
        UNDISTURBED[story] = (begun.cluster, comparable(quiet.cluster), len(quiet.operator.client.written))
    begun_cluster, wanted, writes = UNDISTURBED[story]
    return copy.deepcopy(begun_cluster), wanted, writes


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("story", STORIES)
async def test_killed_at_any_write_of_a_rollout_a_new_process_ends_where_no_fault_would(
    story: str, after: bool
) -> None:
    _, wanted, writes = await undisturbed(story)
    assert writes >= 5
    for at in range(writes):
        begun, _, _ = await undisturbed(story)
        killed = World(begun, Fault(at, Killed(), after=after))
        with pytest.raises(Killed):
            await killed.apply(**image(STORIES[story][1]))
        restarted = World(killed.cluster)
        await restarted.settle()
        assert comparable(restarted.cluster) == wanted, f"killed at write {at}"


def comparable(cluster: FakeCluster) -> dict[Any, Manifest]:
    """Without the names of pods, which count how many there were before."""
    found = cluster.snapshot()
    pods = [(live["metadata"]["labels"], live["status"]) for key, live in found.items() if key[0] == "Pod"]
    rest: dict[Any, Any] = {key: live for key, live in found.items() if key[0] != "Pod"}
    return rest | {"pods": sorted(pods, key=str)}


IMAGES = st.sampled_from(["good", "better", "bad", "crashing"])
STRATEGIES = st.sampled_from(["Auto", "Availability", "ResourceAware"])


@settings(max_examples=12, deadline=None)
@given(changes=st.lists(st.tuples(IMAGES, STRATEGIES, st.integers(1, 3)), min_size=1, max_size=4))
async def test_whatever_was_tried_in_between_the_end_is_that_of_a_fresh_create(
    changes: list[tuple[str, str, int]],
) -> None:
    one = await served("Auto", replicas=2)
    for target, strategy, replicas in changes:
        await one.apply(**image(target), rollout={"strategy": strategy}, replicas=replicas)
        assert len(one.images()) >= min(replicas, 1), "something serves after every change"
    await one.apply(**image("good"), rollout={"strategy": "Auto"}, replicas=2)
    fresh = await served("Auto", replicas=2)
    assert what_matters(one) == what_matters(fresh)


def what_matters(one: World) -> Manifest:
    """Everything but the history: older records and their configuration, the journal, transition times."""
    found = one.cluster.snapshot()
    running = one.cluster.the(DEPLOYMENT)["spec"]["template"]["metadata"]["labels"]["millstream.dev/revision"]
    kept: dict[Any, Any] = {}
    for (kind, _, name), live in found.items():
        is_record = kind == CONTROLLER_REVISION.kind
        if is_record and live["metadata"]["labels"]["millstream.dev/revision"] != running:
            continue
        if kind == CONFIG_MAP.kind and live.get("immutable"):
            continue  # the same engine all the time: one configuration
        live.pop("revision", None)
        for history in ("millstream.dev/applied", "millstream.dev/journaled"):
            live["metadata"].get("annotations", {}).pop(history, None)
        if kind == LLM_DEPLOYMENT.kind:
            live["status"].pop("decisions")
            for condition in live["status"]["conditions"]:
                condition.pop("observedGeneration")
            live["status"].pop("observedGeneration")
        if kind == DEPLOYMENT.kind:
            live["status"].pop("conditions", None)
        kept[kind, "" if kind == POD.kind else name] = live if kind != POD.kind else live["status"]
    return kept
