"""Edited and deleted children come back; what is not ours is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
CHILDREN = (SERVICE_ACCOUNT, NETWORK_POLICY, SERVICE, CONFIG_MAP, DEPLOYMENT, CONTROLLER_REVISION)


def _edit_selector(live: Manifest) -> None:
    live["spec"]["selector"] = {"app": "evil"}


def _add_to_selector(live: Manifest) -> None:
    live["spec"]["selector"]["app"] = "evil"


def _add_to_pod_selector(live: Manifest) -> None:
    live["spec"]["podSelector"]["matchLabels"]["app"] = "evil"


def _edit_target_port(live: Manifest) -> None:
    live["spec"]["ports"][0]["targetPort"] = 9999


def _edit_port(live: Manifest) -> None:
    live["spec"]["ports"][0]["port"] = 81


def _edit_replicas(live: Manifest) -> None:
    live["spec"]["replicas"] = 0


def _edit_image(live: Manifest) -> None:
    live["spec"]["template"]["spec"]["containers"][0]["image"] = "evil"


def _edit_args(live: Manifest) -> None:
    live["spec"]["template"]["spec"]["containers"][0]["args"].append("--port=1")


def _edit_live_config(live: Manifest) -> None:
    live["data"]["live.json"] = "{}"


def _edit_egress(live: Manifest) -> None:
    live["spec"]["egress"] = []


def _edit_token(live: Manifest) -> None:
    live["automountServiceAccountToken"] = True


def _drop_labels(live: Manifest) -> None:
    live["metadata"]["labels"] = {}


EDITS: dict[str, tuple[Kind, Callable[[Manifest], None]]] = {
    "Service selector": (SERVICE, _edit_selector),
    "Service selector, one key more": (SERVICE, _add_to_selector),
    "NetworkPolicy selector, one key more": (NETWORK_POLICY, _add_to_pod_selector),
    "Service target port": (SERVICE, _edit_target_port),
    "Service port": (SERVICE, _edit_port),
    "Service labels": (SERVICE, _drop_labels),
    "Deployment replicas": (DEPLOYMENT, _edit_replicas),
    "Deployment image": (DEPLOYMENT, _edit_image),
    "Deployment args": (DEPLOYMENT, _edit_args),
    "NetworkPolicy egress": (NETWORK_POLICY, _edit_egress),
    "ServiceAccount token": (SERVICE_ACCOUNT, _edit_token),
    "live configuration": (CONFIG_MAP, _edit_live_config),
}


@pytest.mark.parametrize("name", EDITS)
async def test_an_edited_child_is_put_right_and_stays_so(name: str) -> None:
    operator = await served()
    before = operator.cluster.snapshot()
    kind, change = EDITS[name]
    operator.cluster.edit(kind, "demo-live" if kind is CONFIG_MAP else "demo", change)
    assert operator.cluster.snapshot() != before
    await operator.settle()
    assert operator.cluster.snapshot() == before


@pytest.mark.parametrize("kind", CHILDREN, ids=lambda kind: kind.kind)
async def test_a_deleted_child_comes_back(kind: Kind) -> None:
    operator = await served()
    before = operator.cluster.snapshot()
    operator.cluster.remove(kind, operator.cluster.all(kind)[0]["metadata"]["name"])
    await operator.settle()
    assert operator.cluster.snapshot() == before


async def test_what_another_manager_adds_stays_and_costs_no_write_for_ever() -> None:
    """A controller's annotation, a person's variable: server-side apply leaves them, and nothing may spin over it."""
    operator = await served()

    def add(live: Manifest) -> None:
        live["metadata"].setdefault("annotations", {})["deployment.kubernetes.io/revision"] = "1"
        live["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "DEBUG", "value": "1"})

    operator.cluster.edit(DEPLOYMENT, "demo", add)
    await operator.settle()
    assert operator.writes.count(("apply", "Deployment")) == 1
    written = len(operator.writes)
    for _ in range(3):
        await operator.turn()
    assert len(operator.writes) == written
    assert operator.cluster.the(DEPLOYMENT)["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "1"


# What is not ours


@pytest.mark.parametrize("kind", [SERVICE_ACCOUNT, NETWORK_POLICY, SERVICE, DEPLOYMENT], ids=lambda kind: kind.kind)
@pytest.mark.parametrize("labelled", [False, True])
async def test_a_foreign_object_of_a_childs_name_is_left_alone(kind: Kind, labelled: bool) -> None:
    template = (await served()).cluster.the(kind)
    foreign = {**template, "metadata": {"name": "demo", "namespace": "team"}}
    if labelled:
        foreign["metadata"]["labels"] = {"millstream.dev/deployment": "demo"}
    cluster = world()
    before = cluster.put(foreign)
    operator = FakeOperator(cluster)
    await operator.turn()
    assert cluster.the(kind) == before
    tried = [request for request in operator.client.written if request.kind == kind.kind]
    assert all(request.unless_there for request in tried), "what could have changed it was never sent"
    await operator.turn()
    assert [request for request in operator.client.written if request.kind == kind.kind] == tried, "and not again"
    for condition in ("NameConflict", "Stalled"):
        assert operator.condition(condition)["status"] == "True"
        assert f"A {kind.kind} named demo already exists" in operator.condition(condition)["message"]
    assert operator.condition("Ready")["reason"] == "NameConflict"
    assert operator.retries, "it comes back to see whether the other one is gone"


async def test_a_conflict_names_the_other_owner() -> None:
    operator = await served()

    def give_away(live: Manifest) -> None:
        live["metadata"]["ownerReferences"] = [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "shop", "uid": "x", "controller": True}
        ]

    operator.cluster.edit(SERVICE, "demo", give_away)
    await operator.turn()
    assert "it belongs to StatefulSet shop" in operator.condition("NameConflict")["message"]


async def test_a_conflict_that_is_resolved_is_forgotten() -> None:
    cluster = world()
    cluster.put({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "demo", "namespace": "team"}})
    operator = FakeOperator(cluster)
    await operator.turn()
    cluster.remove(SERVICE_ACCOUNT, "demo")
    await operator.settle()
    assert operator.condition("NameConflict") == {}
    assert operator.condition("Stalled") == {}
    assert operator.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("role", ["quantize", "gate"])
async def test_a_job_of_another_role_is_neither_pruned_nor_a_replica(role: str) -> None:
    """Nor is what it mounts: it is ours, and it ends when it is done."""
    operator = await served()
    cluster = operator.cluster
    labels = {"millstream.dev/deployment": "demo", "millstream.dev/role": role}
    owner = cluster.the(SERVICE)["metadata"]["ownerReferences"]

    def put(api_version: str, kind: str, name: str, **content: Any) -> None:
        metadata = {"name": name, "namespace": cluster.the(SERVICE)["metadata"]["namespace"], "labels": labels}
        metadata["ownerReferences"] = owner
        cluster.put({"apiVersion": api_version, "kind": kind, "metadata": metadata, **content})

    put("batch/v1", "Job", "demo-job", spec={}, status={"conditions": [{"type": "Suspended", "status": "True"}]})
    put("v1", "ConfigMap", "demo-report", data={})
    put("v1", "Pod", "demo-job-pod", spec={"nodeName": "n"}, status={"phase": "Running"})
    before = operator.status()
    respec(cluster, replicas=2)
    await operator.settle()
    respec(cluster, replicas=1, warmup={"timeout": "16m"})
    await operator.settle()
    names = {one["metadata"]["name"] for one in (*cluster.all(JOB), *cluster.all(CONFIG_MAP))}
    assert names >= {"demo-job", "demo-report"}
    assert operator.status()["replicas"] == before["replicas"] == 1
    assert operator.status()["rollout"]["phase"] == "Complete"
    assert operator.condition("Ready")["status"] == "True"


async def test_a_neighbours_children_are_never_pruned() -> None:
    operator = await served(manifest(replicas=2))
    neighbour = manifest("neighbour", replicas=2)
    neighbour["metadata"]["uid"] = "uid-of-the-neighbour"
    operator.cluster.put(neighbour)
    await operator.settle("neighbour")
    before = {key: value for key, value in operator.cluster.snapshot().items() if "neighbour" in key[2]}
    respec(operator.cluster, replicas=1)
    await operator.settle()
    after = {key: value for key, value in operator.cluster.snapshot().items() if "neighbour" in key[2]}
    assert before == after
