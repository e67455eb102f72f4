"""The operator reverts changes to its objects, and deletes objects that are no longer wanted."""

from __future__ import annotations

import json

import pytest

from e2e.cluster import Cluster, eventually
from e2e.deployments import CHILD_KINDS, MODEL, Served, children, llmd, read, wait_ready
from e2e.durations import Durations
from e2e.release import REPLICAS, Release

# What a person might do to a child by hand, and where it shows. None of them costs the model its pod.
EDITS = {
    "Service": ("service", {"spec": {"ports": [{"port": 80, "targetPort": 9999}]}}, "spec.ports[0].targetPort"),
    "Deployment": ("deployment", {"spec": {"replicas": 0}}, "spec.replicas"),
    "NetworkPolicy": ("networkpolicy", {"spec": {"egress": []}}, "spec.egress"),
    "ServiceAccount": ("serviceaccount", {"automountServiceAccountToken": True}, "automountServiceAccountToken"),
}
DELETABLE = ("service", "networkpolicy", "serviceaccount", "controllerrevision", "configmap")


def field(cluster: Cluster, namespace: str, kind: str, name: str, path: str) -> str:
    return cluster.kubectl("get", kind, name, "-n", namespace, "-o", f"jsonpath={{.{path}}}")


@pytest.mark.parametrize("kind", EDITS)
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
            timeout_seconds=60,
        )
    wait_ready(cluster, served.namespace, served.name)


@pytest.mark.parametrize("resource", DELETABLE)
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
            timeout_seconds=60,
        )
    wait_ready(cluster, served.namespace, served.name)


def test_a_deleted_deployment_takes_its_children_along(
    cluster: Cluster, release: Release, namespace: str, durations: Durations
) -> None:
    """Also while the operator is away: owner references are enough, so there is no finalizer to hang on."""
    cluster.apply(namespace, llmd("one", replicas=0), llmd("two", replicas=0))
    for name in ("one", "two"):
        eventually(
            lambda name=name: children(cluster, namespace, name),  # type: ignore[misc]
            lambda found: len(found) >= 5,
            what=f"the children of {name}",
        )
    assert not read(cluster, namespace, "one")["metadata"].get("finalizers")
    with durations.measure("deleted LLMDeployment: all children gone"):
        cluster.kubectl("delete", "llmd", "one", "-n", namespace)
        eventually(
            lambda: children(cluster, namespace, "one"), lambda found: not found, what="the children of one gone"
        )
    assert children(cluster, namespace, "two"), "another deployment's children stay"
    release.scale(0)
    try:
        cluster.kubectl("delete", "llmd", "two", "-n", namespace)
        eventually(
            lambda: children(cluster, namespace, "two"), lambda found: not found, what="the children of two gone"
        )
    finally:
        release.scale(REPLICAS)


def test_an_object_of_the_same_name_that_is_not_ours_is_left_alone(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken"},
        "spec": {"ports": [{"port": 1234}], "selector": {"app": "somebody-else"}},
    }
    cluster.apply(namespace, foreign)
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
