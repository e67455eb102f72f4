"""`kubectl delete --cascade=orphan`, then apply: the new object takes the children back, and its pods serve on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    LLM_DEPLOYMENT,
    OWNED,
    POD,
    SERVICE,
    Kind,
)
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import FakeOperator, served
from tests.support.llmdeployments import NAMESPACE, manifest

Manifest = dict[str, Any]
DEMO = OwnerKey(NAMESPACE, "demo")
ANOTHER_UID = "another-uid"


def children(cluster: FakeCluster) -> list[tuple[Kind, Manifest]]:
    return [(kind, live) for kind in OWNED for live in cluster.all(kind)]


def owners(manifest: Manifest) -> list[str]:
    return [reference["uid"] for reference in manifest["metadata"].get("ownerReferences") or ()]


def delete_with_orphans(cluster: FakeCluster) -> None:
    """As the garbage collector does it: the references go first, then the object."""
    for kind, live in children(cluster):
        cluster.edit(kind, live["metadata"]["name"], lambda live: live["metadata"].pop("ownerReferences"))
    cluster.remove(LLM_DEPLOYMENT, "demo")


def apply_again(cluster: FakeCluster, **spec: Any) -> None:
    again = manifest(**spec)
    again["metadata"]["uid"] = ANOTHER_UID
    cluster.put(again)


def pod_uids(cluster: FakeCluster) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.all(POD)}


async def orphaned(**spec: Any) -> FakeOperator:
    operator = await served(manifest(**spec))
    delete_with_orphans(operator.cluster)
    await operator.turn()
    assert operator.writes == [], "orphans are left alone until the object is applied again"
    return operator


async def test_its_own_orphans_are_taken_back_and_no_pod_restarts() -> None:
    operator = await orphaned(replicas=2)
    pods, kept = pod_uids(operator.cluster), operator.cluster.the(DEPLOYMENT)
    records = [one["metadata"]["name"] for one in operator.cluster.all(CONTROLLER_REVISION)]
    apply_again(operator.cluster, replicas=2)
    await operator.settle()
    assert {uid for _, live in children(operator.cluster) for uid in owners(live)} == {ANOTHER_UID}
    assert all(owners(live) for _, live in children(operator.cluster))
    live = operator.cluster.the(DEPLOYMENT)
    assert (live["metadata"]["uid"], live["spec"]) == (kept["metadata"]["uid"], kept["spec"])
    assert pod_uids(operator.cluster) == pods
    assert [one["metadata"]["name"] for one in operator.cluster.all(CONTROLLER_REVISION)] == records
    assert operator.condition("Ready")["status"] == "True"
    assert operator.retries == []
    operator.client.requests.clear()
    await operator.turn()
    assert operator.client.requests == [], "and a steady state costs nothing"


async def test_kinds_of_which_the_watch_is_behind_are_taken_back_in_the_same_turn() -> None:
    """The index has the Deployment as an orphan, and the others as children of the deleted object."""
    operator = await served(manifest(replicas=2))
    before = {kind: operator.cluster.all(kind) for kind in OWNED}
    delete_with_orphans(operator.cluster)
    apply_again(operator.cluster, replicas=2)
    behind = FakeOperator(operator.cluster, model=operator.model)
    for kind, listed in before.items():
        behind.index.replace(kind, operator.cluster.all(kind) if kind is DEPLOYMENT else listed, "1")
    behind.index.replace(LLM_DEPLOYMENT, operator.cluster.all(LLM_DEPLOYMENT), operator.cluster.version)
    await behind.reconciler.reconcile(DEMO)
    assert all(owners(live) == [ANOTHER_UID] for _, live in children(operator.cluster))
    assert behind.condition("NameConflict") == {}


async def test_another_spec_is_a_rollout_that_keeps_what_serves() -> None:
    operator = await orphaned()
    (before,) = operator.cluster.all(CONTROLLER_REVISION)
    template = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    apply_again(operator.cluster, engine={"maxNumSeqs": 3})
    await operator.turn()
    numbers = sorted(one["revision"] for one in operator.cluster.all(CONTROLLER_REVISION))
    assert numbers == [before["revision"], before["revision"] + 1]
    deployment = operator.cluster.the(DEPLOYMENT)["spec"]
    assert deployment["template"] != template
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


NOT_OURS: dict[str, Callable[[Manifest], object]] = {
    "without the mark of an apply": lambda live: live["metadata"]["annotations"].pop("millstream.dev/applied"),
    "managed by another tool": lambda live: live["metadata"]["labels"].update({"app.kubernetes.io/managed-by": "Helm"}),
    "another controller's": lambda live: live["metadata"].update(
        ownerReferences=[{"apiVersion": "v1", "kind": "Shop", "name": "x", "uid": "x", "controller": True}]
    ),
}


@pytest.mark.parametrize("what", NOT_OURS)
async def test_an_object_that_is_not_a_marked_orphan_is_left_alone_and_named(what: str) -> None:
    operator = await orphaned()
    operator.cluster.edit(SERVICE, "demo", NOT_OURS[what])
    before = operator.cluster.the(SERVICE)
    apply_again(operator.cluster)
    await operator.turn()
    assert operator.cluster.the(SERVICE) == before
    conflict = operator.condition("NameConflict")
    assert "A Service named demo already exists" in conflict["message"]
    assert owners(operator.cluster.the(DEPLOYMENT)) == [ANOTHER_UID], "the rest is taken back and serves"


async def test_a_deployment_under_another_name_is_nobodys_child() -> None:
    """Somebody copied it. As a child of ours that is not wanted it would be deleted."""
    operator = await orphaned()
    copied = operator.cluster.the(DEPLOYMENT)
    copied["metadata"] = {**copied["metadata"], "name": "demo-copy"}
    del copied["metadata"]["uid"]
    operator.cluster.put(copied)
    apply_again(operator.cluster)
    await operator.turn()
    assert owners(operator.cluster.the(DEPLOYMENT, "demo-copy")) == []


@pytest.mark.parametrize("broken", [{"format": 99}, {"format": 2}, None])
async def test_without_a_record_that_can_be_read_nothing_is_taken(broken: Manifest | None) -> None:
    """A ConfigMap and labels are soon written by hand; and a record that lacks a field would fail each turn."""
    operator = await orphaned()
    (record,) = operator.cluster.all(CONTROLLER_REVISION)
    name = record["metadata"]["name"]
    operator.cluster.remove(CONTROLLER_REVISION, name)
    if broken is not None:
        forged = {**record, "data": broken, "metadata": dict(record["metadata"])}
        del forged["metadata"]["uid"]
        operator.cluster.put(forged)
    apply_again(operator.cluster)
    await operator.turn()
    assert [owners(operator.cluster.the(kind)) for kind in (DEPLOYMENT, SERVICE)] == [[], []]
    assert operator.condition("NameConflict")["status"] == "True"


async def test_a_policy_that_keeps_one_from_being_taken_back_is_reported() -> None:
    operator = await orphaned()
    operator.cluster.refusing["Service"] = ApiError(403, "Forbidden", "policy: no")
    apply_again(operator.cluster)
    await operator.turn()
    assert owners(operator.cluster.the(SERVICE)) == []
    assert owners(operator.cluster.the(DEPLOYMENT)) == [ANOTHER_UID]
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NameConflict")
    assert "A Service named demo already exists and it has no owner" in ready["message"]


async def test_what_another_controller_adopted_meanwhile_is_not_written() -> None:
    """The index is behind: it still shows an orphan."""
    operator = await orphaned()
    apply_again(operator.cluster)
    theirs = [{"apiVersion": "v1", "kind": "Shop", "name": "x", "uid": "x", "controller": True}]
    original = operator.client.get

    async def adopted_meanwhile(kind: Kind, namespace: str, name: str) -> Manifest | None:
        if kind is SERVICE and owners(operator.cluster.the(SERVICE)) == []:
            operator.cluster.edit(SERVICE, "demo", lambda live: live["metadata"].update(ownerReferences=theirs))
        return await original(kind, namespace, name)

    operator.client.get = adopted_meanwhile  # type: ignore[method-assign]
    await operator.turn()
    assert owners(operator.cluster.the(SERVICE)) == ["x"]


@pytest.mark.deep
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [0, 3, 6, 9])
async def test_killed_at_any_write_the_next_process_goes_on(at: int, after: bool) -> None:
    first = await orphaned(replicas=2)
    cluster, pods = copy.deepcopy(first.cluster), pod_uids(first.cluster)
    apply_again(cluster, replicas=2)
    killed = FakeOperator(cluster, fault=Fault(at, Killed(), after=after))
    with pytest.raises(Killed):
        await killed.turn()
    restarted = FakeOperator(cluster)
    await restarted.settle()
    assert pod_uids(cluster) == pods
    assert {uid for _, live in children(cluster) for uid in owners(live)} == {ANOTHER_UID}
    assert [one["metadata"]["name"] for one in cluster.all(CONFIG_MAP)] == [
        one["metadata"]["name"] for one in first.cluster.all(CONFIG_MAP)
    ]
