"""What goes wrong in a pod is one reason and one message in the status; what dies comes back."""

from __future__ import annotations

import pytest

from e2e.cluster import Cluster, eventually
from e2e.deployments import condition, llmd, pods, read, wait_ready
from e2e.durations import Durations
from e2e.release import Release


@pytest.mark.quick
def test_a_bad_model_path_is_one_clear_reason(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    source = {"source": {"local": {"path": "no-such-model"}}}
    with durations.measure("bad model path -> reason in status"):
        cluster.apply(namespace, llmd("lost", model=source))
        seen = eventually(
            lambda: read(cluster, namespace, "lost"),
            lambda now: condition(now, "Stalled").get("status") == "True",
            what="Stalled",
            timeout_seconds=180,
        )
    ready = condition(seen, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "CheckpointInvalid")
    assert "no-such-model" in ready["message"]
    assert "Traceback" not in ready["message"]
    assert condition(seen, "Stalled")["reason"] == ready["reason"]


def test_an_image_that_cannot_be_pulled_is_named(cluster: Cluster, release: Release, namespace: str) -> None:
    image = f"{release.runtime_image.partition('/')[0]}/no-such-image:1"
    cluster.apply(namespace, llmd("unpulled", runtime={"image": image}))
    seen = eventually(
        lambda: read(cluster, namespace, "unpulled"),
        lambda now: condition(now, "Ready").get("reason") == "ImagePullFailed",
        what="ImagePullFailed",
    )
    assert image in condition(seen, "Ready")["message"]


def test_a_pod_that_dies_makes_it_unready_until_another_answers(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, durations: Durations
) -> None:
    cluster.apply(namespace, llmd("mortal"))
    wait_ready(cluster, namespace, "mortal")
    (pod,) = pods(cluster, namespace, "mortal")
    with durations.measure("killed pod -> Ready again"):
        cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--force", "--grace-period=0")
        eventually(
            lambda: condition(read(cluster, namespace, "mortal"), "Ready"),
            lambda ready: ready.get("status") == "False",
            what="Ready=False",
            timeout_seconds=180,
        )
        wait_ready(cluster, namespace, "mortal")
    (successor,) = pods(cluster, namespace, "mortal")
    assert successor["metadata"]["uid"] != pod["metadata"]["uid"]
