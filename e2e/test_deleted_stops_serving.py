"""A deleted LLMDeployment stops serving at once, also where the garbage collector is behind.

The collector is held back for real: a ValidatingAdmissionPolicy denies it, and nobody else, to delete Deployments of
the test's namespace. The controllers of Deployments and ReplicaSets work as always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import children, llmd, pods, read, wait_ready
from e2e.durations import Durations
from e2e.release import Release
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing

# By kubeadm each controller has an account of its own; without that, all have the second one. Only the collector and
# the controller of namespaces delete Deployments.
COLLECTOR = "system:serviceaccount:kube-system:generic-garbage-collector"
CONTROLLERS = "system:kube-controller-manager"
# The collector waits twice as long after each refusal.
COLLECTED_SECONDS = 400.0
NAMES = ("gone", "ahead", "orphaned", "again")


def policy_objects(name: str, namespace: str) -> tuple[Object, Object]:
    rule: Object = {
        "apiGroups": ["apps"],
        "apiVersions": ["v1"],
        "operations": ["DELETE"],
        "resources": ["deployments"],
    }
    base: Object = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "metadata": {"name": name, "labels": {LEFTOVER_LABEL: LEFTOVER_VALUE}},
    }
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "resourceRules": [rule],
        },
        "validations": [
            {
                "expression": f"!(request.userInfo.username in ['{COLLECTOR}', '{CONTROLLERS}'])",
                "message": "the garbage collector is held back",
            }
        ],
    }
    binding = {"policyName": name, "validationActions": ["Deny"]}
    return (
        base | {"kind": "ValidatingAdmissionPolicy", "spec": spec},
        base | {"kind": "ValidatingAdmissionPolicyBinding", "spec": binding},
    )


@contextmanager
def collector_held(cluster: Cluster, namespace: str, deployment: str) -> Iterator[None]:
    """Hold the garbage collector back for the length of the block. `deployment`: one to ask with, by a dry run."""
    name = f"{namespace}-collector"
    try:
        for manifest in policy_objects(name, namespace):
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
        as_collector = ("--as", COLLECTOR, "--dry-run=server")
        eventually(  # the API server takes a policy up after a moment
            lambda: (
                cluster.run(
                    "kubectl", "delete", "deployment", deployment, "-n", namespace, *as_collector, check=False
                ).stderr
            ),
            lambda said: name in said,
            what="the policy in force",
        )
        yield
    finally:
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            cluster.run("kubectl", "delete", kind, name, check=False)


def uids(cluster: Cluster, namespace: str, name: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods(cluster, namespace, name)}


def owners(deployment: Object) -> list[str]:
    return [one["uid"] for one in deployment["metadata"].get("ownerReferences", ())]


@pytest.mark.shared(SharedThing.ADMISSION_POLICIES)
def test_it_stops_serving_while_the_collector_is_held_back_and_a_successor_serves_afterwards(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    def deployment(name: str) -> Object:
        return cluster.get("deployment", name, "-n", namespace)

    cluster.apply(namespace, *map(llmd, NAMES))
    for name in NAMES:
        wait_ready(cluster, namespace, name, timeout_seconds=400)
    before = {name: uids(cluster, namespace, name) for name in NAMES}
    old_owner = owners(deployment("again"))
    with collector_held(cluster, namespace, "gone"):
        with durations.measure("deleted LLMDeployment: no pods, without a collector"):
            cluster.kubectl("delete", "llmd", "gone", "again", "-n", namespace)
            cluster.kubectl("delete", "llmd", "ahead", "-n", namespace, "--cascade=foreground", "--wait=false")
            cluster.apply(namespace, llmd("again"))
            for name in ("gone", "ahead", "again"):
                eventually(
                    lambda name=name: uids(cluster, namespace, name),  # type: ignore[misc]
                    lambda left: not left,
                    what=f"the pods of {name} ended",
                )
        assert [deployment(name)["spec"]["replicas"] for name in ("gone", "ahead", "again")] == [0, 0, 0]
        assert owners(deployment("again")) == old_owner, "the successor waits for the name of the old Deployment"
        cluster.kubectl("delete", "llmd", "orphaned", "-n", namespace, "--cascade=orphan")
        eventually(lambda: owners(deployment("orphaned")), lambda found: not found, what="the orphan made one")
        assert uids(cluster, namespace, "orphaned") == before["orphaned"], "who asks for orphans keeps them"
    for name in ("gone", "ahead"):
        eventually(
            lambda name=name: children(cluster, namespace, name),  # type: ignore[misc]
            lambda left: not left,
            what=f"the children of {name} collected",
            timeout_seconds=COLLECTED_SECONDS,
        )
    wait_ready(cluster, namespace, "again", timeout_seconds=COLLECTED_SECONDS)
    assert owners(deployment("again")) not in ([], old_owner)
    assert uids(cluster, namespace, "again").isdisjoint(before["again"])
    assert deployment("orphaned")["spec"]["replicas"] == 1
    assert uids(cluster, namespace, "orphaned") == before["orphaned"]
    cluster.apply(namespace, llmd("orphaned"))
    wait_ready(cluster, namespace, "orphaned")
    assert owners(deployment("orphaned")) == [read(cluster, namespace, "orphaned")["metadata"]["uid"]]
    assert uids(cluster, namespace, "orphaned") == before["orphaned"], "it is taken back, and no pod restarts"
