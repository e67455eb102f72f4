"""Killed before and after every write of a companion: the end is the one without a fault, and never two autoscalers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from millstream_operator.kube.client import ApiError, ApiUnreachable
from millstream_operator.kube.kinds import HORIZONTAL_POD_AUTOSCALER, LLM_DEPLOYMENT, OPTIONAL, SCALED_OBJECT
from millstream_operator.rendering.companions import CompanionDefaults
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.llmdeployments import manifest

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]
PROMETHEUS = CompanionDefaults("http://prometheus:9090")


async def _create(operator: FakeOperator) -> None:
    await operator.settle()


async def _change_over(operator: FakeOperator) -> None:
    """KEDA comes: one autoscaler goes, another is made."""
    operator.cluster.installed.add(SCALED_OBJECT)
    await operator.settle()


async def _remove(operator: FakeOperator) -> None:
    respec(operator.cluster, autoscaling=None, monitoring={"mode": "Disabled"})
    await operator.settle()


async def _delete_and_make_again(operator: FakeOperator) -> None:
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    again = manifest(autoscaling={"maxReplicas": 3})
    again["metadata"]["uid"] = "another-uid"
    operator.cluster.put(again)
    await operator.settle()


STORIES: dict[str, Callable[[FakeOperator], Any]] = {
    "create": _create,
    "change over": _change_over,
    "remove": _remove,
    "delete and make again": _delete_and_make_again,
}
PREPARED: dict[str, FakeCluster] = {}


async def prepared(story: str) -> FakeCluster:
    """A copy of the world in which the story begins; made once."""
    if story not in PREPARED:
        cluster = world(manifest(autoscaling={"maxReplicas": 4}))
        cluster.installed |= set(OPTIONAL) - ({SCALED_OBJECT} if story == "change over" else set())
        if story != "create":
            await new_operator(cluster).settle()
        PREPARED[story] = cluster
    return copy.deepcopy(PREPARED[story])


def new_operator(cluster: FakeCluster, fault: Fault | None = None) -> FakeOperator:
    return FakeOperator(cluster, fault=fault, companions=PROMETHEUS)


async def fault_free(story: str) -> tuple[dict[Any, Manifest], int, int]:
    operator = new_operator(await prepared(story))
    await STORIES[story](operator)
    return end_of(operator.cluster), len(operator.client.written), len(operator.client.requests)


def end_of(cluster: FakeCluster) -> dict[Any, Manifest]:
    """The world without the journal, which also tells of what a fault made necessary."""
    found = cluster.snapshot()
    for (kind, _, _), live in found.items():
        if kind == LLM_DEPLOYMENT.kind:
            live["status"].pop("decisions", None)
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("story", STORIES)
async def test_killed_at_any_write_a_new_process_ends_where_no_fault_would(story: str, after: bool) -> None:
    wanted, writes, _ = await fault_free(story)
    assert writes >= 3
    for at in range(writes):
        operator = new_operator(await prepared(story), Fault(at, Killed(), after=after))
        with pytest.raises(Killed):
            await STORIES[story](operator)
        assert not (operator.cluster.all(HORIZONTAL_POD_AUTOSCALER) and operator.cluster.all(SCALED_OBJECT))
        restarted = new_operator(operator.cluster)
        await restarted.settle()
        assert end_of(operator.cluster) == wanted, f"killed at write {at}"
        restarted.client.requests.clear()
        await restarted.turn()
        assert restarted.client.requests == []


FAULTS = {
    "409, refused": (ApiError(409, "Conflict", "the object has been modified"), False),
    "500": (ApiError(500, "InternalError", "failed calling webhook"), False),
    "timeout, done but the answer is lost": (ApiUnreachable("PATCH: TimeoutError"), True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("story", STORIES)
async def test_a_fault_at_any_request_is_a_retry_and_no_other_end(story: str, fault: str) -> None:
    error, after = FAULTS[fault]
    wanted, _, requests = await fault_free(story)
    for at in range(requests):
        operator = new_operator(await prepared(story), Fault(at, error, after=after, writes_only=False))
        await STORIES[story](operator)
        assert end_of(operator.cluster) == wanted, f"{fault} at request {at}"
