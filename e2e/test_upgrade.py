"""From the previous chart and operator to this one and back: the models do not notice.

The previous operator is built from the sources of that release (previous_operator.py), with this checkout's
lock. It is newer than the chart of 0.1.0, needs rights that the chart does not grant, and writes status fields that its
CRD may not know; so while the older chart is there, the test grants the rights, and the CRD stays this checkout's. That
a newer CRD takes every object of the older one is the business of tests/unit/chart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from e2e.client_pod import traffic
from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import condition, is_ready, llmd, pods, read, uid_and_restarts, wait_ready
from e2e.durations import Durations
from e2e.previous_operator import build_previous_operator
from e2e.release import CHART, CHART_INTERVALS, ManagedRelease, Release
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing

# The chart of 0.1.0 as `helm package` makes it, so that this checkout's tools leave it alone.
PREVIOUS = Path(__file__).resolve().parent / "fixtures" / "millstream-0.1.0.tgz"
EXTRA_RIGHTS = "millstream-e2e-newer-operator"


def grant(cluster: Cluster, release: Release) -> None:
    """This chart's rules for the operator's account, under another name."""
    text = cluster.run("helm", "template", release.name, str(CHART), *release.image_flags()).stdout
    roles = [document for document in yaml.safe_load_all(text) if document and document["kind"] == "ClusterRole"]
    rules = [rule for role in roles for rule in role["rules"]]
    api = "rbac.authorization.k8s.io"
    metadata = {"name": EXTRA_RIGHTS, "labels": {LEFTOVER_LABEL: LEFTOVER_VALUE}}
    account = {"kind": "ServiceAccount", "name": release.name, "namespace": release.namespace}
    role: Object = {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": rules}
    binding: Object = {
        "apiVersion": f"{api}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": EXTRA_RIGHTS},
        "subjects": [account],
    }
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [role, binding]})
    cluster.kubectl("apply", "-f", "-", stdin=text)


def revoke(cluster: Cluster) -> None:
    for kind in ("clusterrolebinding", "clusterrole"):
        cluster.kubectl("delete", kind, EXTRA_RIGHTS, "--ignore-not-found")


@pytest.fixture
def from_previous(cluster: Cluster, managed_release: ManagedRelease) -> Iterator[None]:
    """The previous chart and operator are installed; afterwards this checkout's are again, whatever happened."""
    today = managed_release
    previous = replace(today, operator_image=build_previous_operator(today.operator_image, say=print))
    assert previous.operator_image != today.operator_image
    try:
        grant(cluster, today)
        previous.install("crds.enabled=false", chart=PREVIOUS, intervals=CHART_INTERVALS)
        assert today.chart_version() == "0.1.0"
        assert running_images(today) == {previous.operator_image}
        yield
    finally:
        revoke(cluster)
        today.install()


def running_images(release: Release) -> set[str]:
    """Of the operator's pods that are not on their way out."""
    pods = [pod for pod in release.pods() if "deletionTimestamp" not in pod["metadata"]]
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


def identities(cluster: Cluster, namespace: str) -> set[tuple[str, int]]:
    """What a restart would change: uid and restart count of each pod."""
    return {uid_and_restarts(pod) for pod in pods(cluster, namespace, "kept")}


def counted(deployment: Object) -> tuple[int, int]:
    """How many pods there are, and how many of them are ready."""
    return deployment["status"].get("replicas", 0), deployment["status"].get("readyReplicas", 0)


def wait_seen(cluster: Cluster, namespace: str, name: str, replicas: int) -> None:
    """The operator that runs now has looked: it follows a scale and says Ready of it."""
    cluster.kubectl("scale", f"llmd/{name}", "-n", namespace, f"--replicas={replicas}")
    eventually(
        lambda: read(cluster, namespace, name),
        lambda now: is_ready(now) and counted(now) == (replicas, replicas),
        what=f"{replicas} replicas, all ready",
        timeout_seconds=120,
    )


@pytest.mark.shared(SharedThing.RELEASE, SharedThing.CLUSTER_RIGHTS)
def test_an_upgrade_and_a_rollback_restart_no_model(
    cluster: Cluster,
    managed_release: ManagedRelease,
    from_previous: None,
    warm_image: None,
    namespace: str,
    durations: Durations,
) -> None:
    release = managed_release
    cluster.apply(namespace, llmd("kept"))
    wait_ready(cluster, namespace, "kept")
    (before,) = identities(cluster, namespace)
    revisions = {r["metadata"]["uid"] for r in cluster.items("controllerrevision", "-n", namespace)}
    with traffic(cluster, namespace, "kept", release.operator_image) as requests:
        with durations.measure("helm upgrade 0.1.0 -> this chart and operator"):
            release.install()
        revoke(cluster)  # from here on what the chart itself grants has to do
        assert release.chart_version() != "0.1.0"
        assert running_images(release) == {release.operator_image}
        wait_seen(cluster, namespace, "kept", 2)
        assert before in identities(cluster, namespace), "the pod of the older chart is still the same"
        both = identities(cluster, namespace)
        grant(cluster, release)
        with durations.measure("helm rollback to 0.1.0"):
            release.rollback()
        assert release.chart_version() == "0.1.0"
        wait_seen(cluster, namespace, "kept", 1)
        requests.wait_for(3)
        lost = [line for line in requests.lines() if line != "ok"]
    assert not lost
    (left,) = identities(cluster, namespace)
    assert left in both, "the rollback took one away and restarted none"
    assert {r["metadata"]["uid"] for r in cluster.items("controllerrevision", "-n", namespace)} == revisions
    assert condition(read(cluster, namespace, "kept"), "Ready")["status"] == "True"
