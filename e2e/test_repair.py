"""The operator reverts changes to its objects, and deletes objects that are no longer wanted."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from e2e.cluster import Cluster, eventually
from e2e.deployments import CHILD_KINDS, MODEL, Served, children, llmd, read, service_of_others, wait_ready
from e2e.durations import Durations
from e2e.release import REPLICAS, ManagedRelease, Release
from e2e.shared_things import SharedThing

# What a person might do to a child by hand, and where it shows. None of them costs the model its pod.
EDITS = {
    "Service": ("service", {"spec": {"ports": [{"port": 80, "targetPort": 9999}]}}, "spec.ports[0].targetPort"),
    "Deployment": ("deployment", {"spec": {"replicas": 0}}, "spec.replicas"),
    "NetworkPolicy": ("networkpolicy", {"spec": {"egress": []}}, "spec.egress"),
    "ServiceAccount": ("serviceaccount", {"automountServiceAccountToken": True}, "automountServiceAccountToken"),
}
DELETABLE = ("service", "networkpolicy", "serviceaccount", "controllerrevision", "configmap")


def first_is_quick(names: Iterable[str]) -> list[ParameterSet]:
    """The names as parameters, of which the quick tier takes one."""
    first, *others = names
    return [pytest.param(first, marks=pytest.mark.quick), *map(pytest.param, others)]


def field(cluster: Cluster, namespace: str, kind: str, name: str, path: str) -> str:
    return cluster.kubectl("get", kind, name, "-n", namespace, "-o", f"jsonpath={{.{path}}}")


@pytest.mark.parametrize("kind", first_is_quick(EDITS))
def test_an_edited_child_is_put_right(cluster: Cluster, served: Served, durations: Durations, kind: str) -> None:
    resource, patch, path = EDITS[kind]
    before = field(cluster, served.namespace, resource, served.name, path)
    with durations.measure(f"edited {kind} repaired"):
        change = ["--type", "merge", "--patch", json.dumps(patch)]
        cluster.kubectl("patch", resource, served.name, "-n", served.namespace, *change)
        eventually(
            lambda: field(cluster, served.namespace, resource, served.name, path),
            lambda now: now == before,
            what=f"{path} of the {kind} back to {before}",
            timeout_seconds=180,
        )
    wait_ready(cluster, served.namespace, served.name)


@pytest.mark.parametrize("resource", first_is_quick(DELETABLE))
def test_a_deleted_child_comes_back(cluster: Cluster, served: Served, durations: Durations, resource: str) -> None:
    def names() -> dict[str, str]:
        found = cluster.items(resource, "-n", served.namespace, "-l", f"app.kubernetes.io/instance={served.name}")
        return {item["metadata"]["name"]: item["metadata"]["uid"] for item in found}

    before = names()
    assert before
    with durations.measure(f"deleted {resource} made again"):
        cluster.kubectl("delete", resource, "-n", served.namespace, *before)
        eventually(
            names,
            lambda now: now.keys() == before.keys() and not set(now.values()) & set(before.values()),
            what=f"{resource} made again",
            timeout_seconds=180,
        )
    wait_ready(cluster, served.namespace, served.name)


def apply_without_pods(cluster: Cluster, namespace: str, *names: str) -> None:
    """LLMDeployments that have all their children, and no pod."""
    cluster.apply(namespace, *(llmd(name, replicas=0) for name in names))
    for name in names:
        eventually(
            lambda name=name: children(cluster, namespace, name),  # type: ignore[misc]
            lambda found: len(found) >= 5,
            what=f"the children of {name}",
        )


def wait_for_no_children(cluster: Cluster, namespace: str, name: str) -> None:
    what = f"the children of {name} gone"
    eventually(lambda: children(cluster, namespace, name), lambda found: not found, what=what)


@pytest.mark.quick
def test_a_deleted_deployment_takes_its_children_along(
    cluster: Cluster, release: Release, namespace: str, durations: Durations
) -> None:
    apply_without_pods(cluster, namespace, "gone", "stays")
    assert not read(cluster, namespace, "gone")["metadata"].get("finalizers")
    with durations.measure("deleted LLMDeployment: all children gone"):
        cluster.kubectl("delete", "llmd", "gone", "-n", namespace)
        wait_for_no_children(cluster, namespace, "gone")
    assert len(children(cluster, namespace, "stays")) >= 5, "another deployment's children stay"


@pytest.mark.shared(SharedThing.OPERATOR)
def test_a_deployment_that_is_deleted_while_the_operator_is_away_takes_its_children_along(
    cluster: Cluster, managed_release: ManagedRelease, namespace: str
) -> None:
    """Owner references are enough, so there is no finalizer to hang on."""
    apply_without_pods(cluster, namespace, "gone")
    managed_release.scale(0)
    try:
        cluster.kubectl("delete", "llmd", "gone", "-n", namespace)
        wait_for_no_children(cluster, namespace, "gone")
    finally:
        managed_release.scale(REPLICAS)


def test_an_object_of_the_same_name_that_is_not_ours_is_left_alone(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    cluster.apply(namespace, service_of_others("taken"))
    cluster.apply(namespace, llmd("taken", replicas=0))
    seen = eventually(
        lambda: read(cluster, namespace, "taken"),
        lambda now: any(
            c["status"] == "True" and c["type"] == "NameConflict"
            for c in (now.get("status") or {}).get("conditions", [])
        ),
        what="NameConflict",
    )
    messages = " ".join(c["message"] for c in seen["status"]["conditions"])
    assert "Service" in messages
    service = cluster.get("service", "taken", "-n", namespace)
    assert service["spec"]["selector"] == {"app": "somebody-else"}
    assert not service["metadata"].get("ownerReferences")


def test_every_child_is_owned_and_labelled(cluster: Cluster, served: Served) -> None:
    uid = read(cluster, served.namespace, served.name)["metadata"]["uid"]
    owned = [
        item
        for item in cluster.items(CHILD_KINDS, "-n", served.namespace)
        if item["metadata"].get("labels", {}).get("app.kubernetes.io/instance") == MODEL
    ]
    assert {item["kind"] for item in owned} >= {
        "Deployment",
        "Service",
        "ServiceAccount",
        "NetworkPolicy",
        "ControllerRevision",
    }
    for item in owned:
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid, True)
