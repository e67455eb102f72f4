"""A deleted LLMDeployment stops serving at once, also while no garbage collector runs: none runs in these tests, but
where one says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from millstream_operator.kube.client import ApiError, ApiUnreachable
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import DEPLOYMENT, HORIZONTAL_POD_AUTOSCALER, LLM_DEPLOYMENT, POD, Kind
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import FakeOperator, served, world
from tests.support.llmdeployments import NAMESPACE, manifest

Manifest = dict[str, Any]
DEMO = OwnerKey(NAMESPACE, "demo")
STOPPING = [("get", "LLMDeployment"), ("get", "Deployment"), ("merge", "Deployment")]
ANOTHER_UID = "another-uid"
MAX_TURNS = 10


def replicas(cluster: FakeCluster) -> int:
    found: int = cluster.the(DEPLOYMENT)["spec"]["replicas"]
    return found


def asked(operator: FakeOperator) -> list[tuple[str, str]]:
    return [(one.verb, one.kind) for one in operator.client.requests]


def being_deleted(cluster: FakeCluster, *finalizers: str) -> None:
    """The API server's answer to a deletion of an object with finalizers: it stays, and waits for them."""
    marks = {"deletionTimestamp": "2025-01-01T00:00:00Z", "finalizers": [*finalizers]}
    cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].update(marks))


def make_again(cluster: FakeCluster, **spec: Any) -> None:
    again = manifest(**spec)
    again["metadata"]["uid"] = ANOTHER_UID
    cluster.put(again)


def owned_by(cluster: FakeCluster, *references: Manifest) -> None:
    """Somebody edits who owns the Deployment."""
    cluster.edit(DEPLOYMENT, "demo", lambda live: live["metadata"].update(ownerReferences=[*references]))


def owner_of(cluster: FakeCluster) -> Manifest:
    (reference,) = cluster.the(DEPLOYMENT)["metadata"]["ownerReferences"]
    found: Manifest = reference
    return found


async def until_stopped(operator: FakeOperator) -> None:
    """Turn as long as turns ask to be repeated."""
    for _ in range(MAX_TURNS):
        before = len(operator.retries)
        await operator.turn()
        if len(operator.retries) == before:
            return
    raise AssertionError(f"does not end: {operator.retries[-3:]}")


async def test_its_deployment_is_scaled_to_zero_once_and_its_pods_end() -> None:
    operator = await served(manifest(replicas=2))
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    assert asked(operator) == STOPPING
    operator.cluster.roll_out()
    assert operator.cluster.all(POD) == []
    operator.client.requests.clear()
    await operator.turn()
    assert asked(operator) == [], "and it stays with the garbage collector"
    assert operator.retries == []


async def test_the_collector_finds_what_it_finds_without_an_operator() -> None:
    """No finalizer, no new object, no other child touched: a deletion needs no operator."""
    operator = await served(manifest(replicas=2))
    before = operator.cluster.snapshot()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    after = operator.cluster.snapshot()
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed == {("LLMDeployment", NAMESPACE, "demo"), ("Deployment", NAMESPACE, "demo")}
    assert "finalizers" not in operator.cluster.the(DEPLOYMENT)["metadata"]
    operator.cluster.collect_garbage()
    assert operator.cluster.all(DEPLOYMENT) == []


async def test_an_autoscaler_that_asks_for_pods_again_gets_none() -> None:
    """KEDA activates what has no replicas. (A HorizontalPodAutoscaler leaves it alone.)"""
    operator = await served()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    operator.cluster.edit(DEPLOYMENT, "demo", lambda live: live["spec"].update(replicas=3))
    await operator.turn()
    assert replicas(operator.cluster) == 0


async def test_its_own_autoscaler_scales_what_is_no_more() -> None:
    """So it cannot ask for pods of a deleted LLMDeployment while it waits for the collector."""
    operator = await served(manifest(autoscaling={"maxReplicas": 3}))
    target = operator.cluster.the(HORIZONTAL_POD_AUTOSCALER)["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("LLMDeployment", "demo")


# Deletions that keep the pods, and those that wait


async def test_what_asks_for_orphans_keeps_its_pods() -> None:
    """The object waits for the finalizer; the collector takes the owner references away, then the finalizer."""
    operator = await served()
    being_deleted(operator.cluster, "orphan")
    await operator.turn()
    assert operator.writes == [("apply", "LLMDeployment/status")], "which says that it is being deleted"
    owned_by(operator.cluster)
    await operator.turn()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    assert replicas(operator.cluster) == 1
    assert operator.writes == [("apply", "LLMDeployment/status")]


async def test_orphans_of_which_the_watch_has_not_told_yet_keep_their_pods() -> None:
    """The LLMDeployment's end may be seen before the Deployment's other owner: the two watches have no order."""
    operator = await served()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    owned_by(operator.cluster)
    operator.index.replace(LLM_DEPLOYMENT, [], operator.cluster.version)
    await operator.reconciler.reconcile(DEMO)
    assert asked(operator) == STOPPING[:2]
    assert replicas(operator.cluster) == 1


async def test_orphans_that_are_made_between_look_and_write_keep_their_pods() -> None:
    operator = await served()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    original = operator.client.get

    async def orphaned_meanwhile(kind: Kind, namespace: str, name: str) -> Manifest | None:
        live = await original(kind, namespace, name)
        if kind is DEPLOYMENT and not operator.retries:
            owned_by(operator.cluster)
        return live

    operator.client.get = orphaned_meanwhile  # type: ignore[method-assign]
    await operator.turn()
    assert "409" in str(operator.retries[-1])
    await operator.turn()
    assert replicas(operator.cluster) == 1


async def test_a_foreground_deletion_stops_serving_before_the_object_is_gone() -> None:
    operator = await served()
    being_deleted(operator.cluster, "foregroundDeletion")
    await operator.turn()
    assert replicas(operator.cluster) == 0


@pytest.mark.parametrize("finalizers", [("example.com/backup",), ("foregroundDeletion", "orphan")])
async def test_an_object_whose_children_the_collector_leaves_keeps_its_pods(finalizers: tuple[str, ...]) -> None:
    operator = await served()
    being_deleted(operator.cluster, *finalizers)
    await operator.turn()
    assert replicas(operator.cluster) == 1
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    assert replicas(operator.cluster) == 0


async def test_an_index_that_lost_the_object_costs_nobody_a_pod() -> None:
    operator = await served()
    operator.index.remove(LLM_DEPLOYMENT, operator.cluster.the(LLM_DEPLOYMENT))
    await operator.reconciler.reconcile(DEMO)
    assert asked(operator) == STOPPING[:1]
    assert replicas(operator.cluster) == 1


# Whose Deployment it is

OTHERS: dict[str, Callable[[Manifest], list[Manifest]]] = {
    "nobody's": lambda _: [],
    "two owners'": lambda ours: [ours, {**ours, "kind": "Backup", "controller": False, "uid": "x"}],
    "another controller's": lambda ours: [{**ours, "kind": "StatefulSet", "apiVersion": "apps/v1"}],
    "another group's": lambda ours: [{**ours, "apiVersion": "example.com/v1"}],
    "a reference that is no controller's": lambda ours: [{**ours, "controller": False}],
}


@pytest.mark.parametrize("whose", OTHERS)
async def test_another_owners_deployment_is_not_touched(whose: str) -> None:
    operator = await served()
    owned_by(operator.cluster, *OTHERS[whose](owner_of(operator.cluster)))
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    await operator.turn()
    assert asked(operator) == []
    assert replicas(operator.cluster) == 1


async def test_a_deployment_that_is_being_deleted_is_not_written() -> None:
    """Its controller looks at its replicas no more."""
    operator = await served()
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    marks = {"deletionTimestamp": "2025-01-01T00:00:00Z", "finalizers": ["foregroundDeletion"]}
    operator.cluster.edit(DEPLOYMENT, "demo", lambda live: live["metadata"].update(marks))
    await operator.turn()
    assert asked(operator) == []


async def test_a_successor_of_the_same_name_serves_with_a_deployment_of_its_own() -> None:
    operator = await served(manifest(replicas=2))
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    make_again(operator.cluster, replicas=3)
    await operator.turn()
    assert replicas(operator.cluster) == 0, "the old one's pods end while the collector is behind"
    assert "to be deleted" in str(operator.retries[-1])
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Starting")
    assert "taken by that of a deleted LLMDeployment of the same name" in ready["message"]
    assert "Stalled" not in str(operator.cluster.the(LLM_DEPLOYMENT)["status"]["conditions"])
    operator.cluster.roll_out()
    assert operator.cluster.all(POD) == []
    await operator.settle()  # the collector comes
    assert owner_of(operator.cluster)["uid"] == ANOTHER_UID
    assert replicas(operator.cluster) == 3
    assert operator.condition("Ready")["status"] == "True"
    operator.client.requests.clear()
    await operator.turn()
    assert asked(operator) == []


async def test_a_successors_deployment_is_not_stopped_for_its_predecessor() -> None:
    """The index still has the old Deployment while the collector has been there and the successor has its own."""
    operator = await served()
    old = operator.cluster.the(DEPLOYMENT)
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    make_again(operator.cluster)
    await operator.settle()
    stale = FakeOperator(operator.cluster)
    stale.index.put(DEPLOYMENT, old)
    await stale.reconciler.reconcile(DEMO)
    assert asked(stale) == STOPPING[:2]
    assert owner_of(operator.cluster)["uid"] == ANOTHER_UID
    assert replicas(operator.cluster) == 1


# Faults


async def deleted_world() -> FakeCluster:
    """Deleted, and made anew with the same name, so that both are at stake."""
    operator = await served(manifest(replicas=2))
    operator.cluster.remove(LLM_DEPLOYMENT, "demo")
    return operator.cluster


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_its_write_the_next_process_finds_it(after: bool) -> None:
    cluster = await deleted_world()
    operator = FakeOperator(cluster, fault=Fault(0, Killed(), after=after))
    with pytest.raises(Killed):
        await operator.turn()
    restarted = FakeOperator(cluster)
    await until_stopped(restarted)
    assert replicas(cluster) == 0
    assert len(restarted.client.written) == (0 if after else 1)


FAULTS = {
    "409": (ApiError(409, "Conflict", "the object has been modified"), False),
    "429": (ApiError(429, "TooManyRequests", "try again", 1.0), False),
    "500": (ApiError(500, "InternalError", "etcd"), False),
    "refused by an admission plugin": (ApiError(403, "Forbidden", "denied"), False),
    "no answer": (ApiUnreachable("TimeoutError"), False),
    "done but the answer is lost": (ApiUnreachable("TimeoutError"), True),
}


@pytest.mark.parametrize("at", range(len(STOPPING)))
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_request_is_a_retry(fault: str, at: int) -> None:
    cluster = copy.deepcopy(await deleted_world())
    error, after = FAULTS[fault]
    operator = FakeOperator(cluster, fault=Fault(at, error, after=after, writes_only=False))
    await until_stopped(operator)
    assert len(operator.retries) == 1
    assert replicas(cluster) == 0


async def test_a_collector_that_is_faster_than_the_write_is_no_error() -> None:
    cluster = await deleted_world()
    operator = FakeOperator(cluster)
    original = operator.client.get

    async def collected_meanwhile(kind: Kind, namespace: str, name: str) -> Manifest | None:
        live = await original(kind, namespace, name)
        if kind is DEPLOYMENT:
            cluster.collect_garbage()
        return live

    operator.client.get = collected_meanwhile  # type: ignore[method-assign]
    await operator.turn()
    assert operator.retries == []
    operator.client.requests.clear()
    await operator.turn()
    assert asked(operator) == []


async def test_a_deployment_that_is_made_while_its_owner_is_deleted_is_stopped_too() -> None:
    """A turn works with the object that it has read; the next one sees the deletion."""
    operator = FakeOperator(world())
    original = operator.client.apply_new

    async def deleted_meanwhile(wanted: Manifest) -> Manifest | None:
        if wanted["kind"] == DEPLOYMENT.kind and operator.cluster.get(LLM_DEPLOYMENT, "demo") is not None:
            operator.cluster.remove(LLM_DEPLOYMENT, "demo")
        return await original(wanted)

    operator.client.apply_new = deleted_meanwhile  # type: ignore[assignment, method-assign]
    await operator.turn()
    assert replicas(operator.cluster) == 1
    await operator.turn()
    assert replicas(operator.cluster) == 0
