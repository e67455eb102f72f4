"""The operator is killed in the middle of its work, again and again, and the end is the same."""

from __future__ import annotations

import time

import pytest

from e2e.cluster import Cluster, eventually
from e2e.deployments import boot_config, children, is_ready, llmd, read
from e2e.durations import Durations
from e2e.release import ManagedRelease
from e2e.shared_things import SharedThing

NAMES = [f"many-{number}" for number in range(6)]
KINDS = {"Deployment", "Service", "ServiceAccount", "NetworkPolicy", "ControllerRevision", "ConfigMap"}


@pytest.mark.quick
@pytest.mark.shared(SharedThing.OPERATOR)
def test_killed_in_the_middle_of_several_applies_it_converges(
    cluster: Cluster, managed_release: ManagedRelease, warm_image: None, namespace: str, durations: Durations
) -> None:
    with durations.measure("six applies, operator killed four times -> converged"):
        for index, name in enumerate(NAMES):
            # One of them really serves; the others need no pod to show that their objects are right.
            cluster.apply(namespace, llmd(name, replicas=1 if index == 0 else 0))
            if index % 2 == 1:
                time.sleep(0.3 * index)  # at a different point of its start each time
                managed_release.kill()
        cluster.apply(namespace, llmd(NAMES[1], replicas=0, engine={"maxModelLen": 512}))
        managed_release.kill()
        for name in NAMES:
            eventually(
                lambda name=name: read(cluster, namespace, name),  # type: ignore[misc]
                lambda now: (now.get("status") or {}).get("observedGeneration") == now["metadata"]["generation"],
                what=f"{name} observed",
            )
        eventually(lambda: read(cluster, namespace, NAMES[0]), is_ready, what=f"{NAMES[0]} Ready", timeout_seconds=120)
    for name in NAMES:
        found = children(cluster, namespace, name)
        assert {kind for kind, _ in found} == KINDS
        once = [kind for kind, _ in found if kind not in ("ControllerRevision", "ConfigMap")]
        assert len(once) == len(KINDS) - 2, f"{name} has a child twice: {sorted(found)}"
        assert ("ConfigMap", f"{name}-live") in found
    deployment = cluster.get("deployment", NAMES[1], "-n", namespace)
    assert boot_config(cluster, namespace, deployment["spec"]["template"]["spec"])["max_model_len"] == 512
    orphans = [
        item["metadata"]["name"]
        for item in cluster.items("deployment,service,controllerrevision", "-n", namespace)
        if not item["metadata"].get("ownerReferences")
    ]
    assert not orphans
