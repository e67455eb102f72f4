"""Killed before and after every write, refused or cut off at every request: the end is the one without a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from millstream_operator.kube.client import ApiError, ApiUnreachable
from millstream_operator.kube.kinds import (
    LLM_DEPLOYMENT,
    POD_DISRUPTION_BUDGET,
    Kind,
)
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

pytestmark = pytest.mark.deep

Manifest = dict[str, Any]


async def _create(operator: FakeOperator) -> None:
    await operator.settle()


async def _update(operator: FakeOperator) -> None:
    respec(operator.cluster, engine={"maxNumSeqs": 8}, service={"port": 8080}, replicas=1)
    await operator.settle()


async def _delete_and_make_again(operator: FakeOperator) -> None:
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    again = manifest(replicas=2)
    again["metadata"]["uid"] = "another-uid"
    operator.cluster.put(again)
    await operator.settle()


Step = Callable[[FakeOperator], Any]


async def _create_from_a_hub(operator: FakeOperator) -> None:
    """An inspection that fails at first: two Jobs, two records, and the claim of the cache."""
    await operator.turn()
    operator.cluster.run_jobs("", 1, at="2024-12-31T23:59:00Z")  # long enough ago to be tried again at once
    await operator.settle()


STORIES: dict[str, Step] = {
    "create": _create,
    "create from a hub": _create_from_a_hub,
    "update": _update,
    "delete and make again": _delete_and_make_again,
}


PREPARED: dict[str, FakeCluster] = {}


async def prepared(story: str) -> FakeCluster:
    """A copy of the world in which the story begins; made once."""
    if story not in PREPARED:
        PREPARED[story] = await prepare(story)
    return copy.deepcopy(PREPARED[story])


async def prepare(story: str) -> FakeCluster:
    if story == "create":
        return world(manifest(replicas=2))
    if story == "create from a hub":
        return world(manifest(model={"source": {"huggingFace": {"repository": "org/name"}}, "cache": {"size": "9Gi"}}))
    # A history that is full, so that an update prunes a record as well as the budget.
    operator = await served(manifest(replicas=2))
    for sequences in (1, 2, 3):
        respec(operator.cluster, engine={"maxNumSeqs": sequences})
        await operator.settle()
    return operator.cluster


async def fault_free(story: str) -> tuple[dict[Any, Manifest], int, int]:
    """The end of the story without a fault, and how many writes and requests it took."""
    operator = FakeOperator(await prepared(story))
    await STORIES[story](operator)
    return operator.cluster.snapshot(), len(operator.client.written), len(operator.client.requests)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("story", STORIES)
async def test_killed_at_any_write_a_new_process_ends_where_no_fault_would(story: str, after: bool) -> None:
    wanted, writes, _ = await fault_free(story)
    assert writes >= 5
    for at in range(writes):
        operator = FakeOperator(await prepared(story), fault=Fault(at, Killed(), after=after))
        with pytest.raises(Killed):
            await STORIES[story](operator)
        restarted = FakeOperator(operator.cluster)
        await restarted.settle()
        assert operator.cluster.snapshot() == wanted, f"killed at write {at}"
        restarted.client.requests.clear()
        await restarted.turn()
        assert restarted.client.requests == []


FAULTS = {
    "409, refused": (ApiError(409, "Conflict", "the object has been modified"), False),
    "timeout, done but the answer is lost": (ApiUnreachable("PATCH: TimeoutError"), True),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("story", STORIES)
async def test_a_fault_at_any_request_is_a_retry_and_no_other_end(story: str, fault: str) -> None:
    error, after = FAULTS[fault]
    wanted, _, requests = await fault_free(story)
    for at in range(requests):
        operator = FakeOperator(await prepared(story), fault=Fault(at, error, after=after, writes_only=False))
        await STORIES[story](operator)
        assert operator.cluster.snapshot() == wanted, f"{fault} at request {at}"


async def test_the_servers_own_wish_to_wait_is_kept() -> None:
    operator = FakeOperator(world(), fault=Fault(0, ApiError(429, "TooManyRequests", "try again", 7.0)))
    await operator.turn()
    assert operator.retries[-1].at_least_seconds == 7.0
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_delete_races_with_a_newer_state_and_loses() -> None:
    """The precondition: what was looked at is what is deleted, or nothing is."""
    operator = await served(manifest(replicas=2))
    respec(operator.cluster, replicas=1)
    original = operator.client.get

    async def changed_meanwhile(kind: Kind, namespace: str, name: str) -> Manifest | None:
        live = await original(kind, namespace, name)
        if kind is POD_DISRUPTION_BUDGET and not operator.retries:
            operator.cluster.edit(kind, name, lambda budget: budget["metadata"].update(annotations={"a": "b"}))
        return live

    operator.client.get = changed_meanwhile  # type: ignore[method-assign]
    await operator.turn()
    assert operator.cluster.get(POD_DISRUPTION_BUDGET, "demo") is not None
    assert "409" in str(operator.retries[-1])
    await operator.settle()
    assert operator.cluster.get(POD_DISRUPTION_BUDGET, "demo") is None
