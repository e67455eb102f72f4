"""Changes: a new spec rolls out without a lost request, a scale is followed, an upgrade touches nothing."""

from __future__ import annotations

import pytest

from e2e.client_pod import traffic
from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import Served, boot_config, condition, is_ready, llmd, pods, read, service_of_others, wait_ready
from e2e.durations import Durations
from e2e.release import CHART_INTERVALS, ManagedRelease, Release
from e2e.shared_things import SharedThing


@pytest.mark.quick
def test_a_changed_spec_rolls_out_without_a_lost_request(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("rolling"))
    wait_ready(cluster, namespace, "rolling")
    (before,) = pods(cluster, namespace, "rolling")
    with traffic(cluster, namespace, "rolling", release.operator_image) as requests:
        with durations.measure("spec change -> new generation Ready, under traffic"):
            cluster.apply(namespace, llmd("rolling", engine={"maxModelLen": 1024, "maxNumSeqs": 4}))
            seen = eventually(
                lambda: read(cluster, namespace, "rolling"),
                lambda now: is_ready(now) and now["metadata"]["generation"] == 2,
                what="generation 2 Ready",
                timeout_seconds=120,
            )
        name = before["metadata"]["name"]
        eventually(lambda: cluster.find("pod", name, "-n", namespace), lambda pod: pod is None, what="the old pod gone")
        requests.wait_for(5)
        lost = requests.lost()
    assert not lost
    assert seen["status"]["updatedReplicas"] == 1
    (after,) = pods(cluster, namespace, "rolling")
    assert boot_config(cluster, namespace, after["spec"])["max_model_len"] == 1024


@pytest.mark.quick
def test_the_scale_subresource_is_followed(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("scaled", replicas=0))
    eventually(
        lambda: condition(read(cluster, namespace, "scaled"), "Ready"),
        lambda ready: ready.get("reason") == "ScaledToZero",
        what="ScaledToZero",
    )
    with durations.measure("kubectl scale 0 -> 2, both ready"):
        cluster.kubectl("scale", "llmd/scaled", "-n", namespace, "--replicas=2")
        seen = wait_ready(cluster, namespace, "scaled")
        seen = eventually(
            lambda: read(cluster, namespace, "scaled"),
            lambda now: now["status"].get("readyReplicas") == 2,
            what="two ready replicas",
        )
    selector = seen["status"]["selector"]
    assert len(cluster.items("pods", "-n", namespace, "-l", selector)) == 2, "an autoscaler finds the pods by selector"
    revisions = cluster.items("controllerrevision", "-n", namespace)
    assert len(revisions) == 1, "a scale is no new revision"
    cluster.kubectl("scale", "llmd/scaled", "-n", namespace, "--replicas=0")
    eventually(lambda: pods(cluster, namespace, "scaled"), lambda found: not found, what="no pod left")


@pytest.mark.shared(SharedThing.RELEASE, SharedThing.EVERYTHING)
def test_an_upgrade_with_other_defaults_restarts_nothing(
    cluster: Cluster, managed_release: ManagedRelease, served: Served, namespace: str, durations: Durations
) -> None:
    """What runs is pinned. The new defaults, another name of the image and a label, come with the next change.

    This release looks for changes as often as the chart says, and not as often as the release of the other tests.
    """
    other_image = image_by_digest(cluster, served)
    assert other_image != managed_release.runtime_image
    cluster.apply(namespace, llmd("pinned"))
    wait_ready(cluster, namespace, "pinned")
    before = everything_that_runs(cluster)
    try:
        with durations.measure("helm upgrade with other defaults"):
            changes = f"runtime.image={other_image}", "podDefaults.labels.team=search"
            managed_release.install(*changes, intervals=CHART_INTERVALS)
        # The new operator has looked at everything when it has followed a change of something.
        cluster.apply(namespace, llmd("witness", replicas=0))
        eventually(
            lambda: (read(cluster, namespace, "witness").get("status") or {}).get("runtime", {}).get("image"),
            lambda image: image == other_image,
            what="planned with the new default",
        )
        assert everything_that_runs(cluster) == before
        assert read(cluster, namespace, "pinned")["status"]["runtime"]["image"] == managed_release.runtime_image

        # Nothing watches another owner's object: the operator sees at its next look that it is gone.
        cluster.apply(namespace, service_of_others("taken"), llmd("taken", replicas=0))
        eventually(
            lambda: condition(read(cluster, namespace, "taken"), "NameConflict"),
            lambda found: found.get("status") == "True",
            what="NameConflict",
        )
        cluster.kubectl("delete", "service", "taken", "-n", namespace)

        cluster.apply(namespace, llmd("pinned", engine={"maxModelLen": 1024}))
        seen = wait_ready(cluster, namespace, "pinned")
        assert seen["status"]["runtime"]["image"] == other_image
        (adopted,) = eventually(
            lambda: pods(cluster, namespace, "pinned"), lambda found: len(found) == 1, what="one pod left"
        )
        assert adopted["spec"]["containers"][0]["image"] == other_image
        assert adopted["metadata"]["labels"]["team"] == "search"
        eventually(
            lambda: cluster.find("service", "taken", "-n", namespace),
            lambda found: found is not None and bool(found["metadata"].get("ownerReferences")),
            what="our own Service, within half a minute",
            timeout_seconds=120,
        )
    finally:
        managed_release.install()


def image_by_digest(cluster: Cluster, served: Served) -> str:
    """The runtime image under its other name, repository@digest: a different default that runs the same thing."""
    (pod,) = pods(cluster, served.namespace, served.name)
    return str(pod["status"]["containerStatuses"][0]["imageID"])


def everything_that_runs(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Namespace/name of every pod of every LLMDeployment in the cluster, with its UID and restarts."""

    def restarts(pod: Object) -> int:
        return sum(item["restartCount"] for item in pod["status"].get("containerStatuses", []))

    return {
        f"{pod['metadata']['namespace']}/{pod['metadata']['name']}": (pod["metadata"]["uid"], restarts(pod))
        for pod in cluster.items("pods", "-A", "-l", "millstream.dev/deployment")
        if "deletionTimestamp" not in pod["metadata"] and _is_ready(pod)
    }


def _is_ready(pod: Object) -> bool:
    return all(item["ready"] for item in pod["status"].get("containerStatuses") or [{"ready": False}])
