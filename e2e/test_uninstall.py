"""What `helm uninstall` leaves and takes. Runs last (conftest.py): the second test deletes every LLMDeployment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster, eventually
from e2e.deployments import llmd, pods, read, wait_ready
from e2e.leftovers import CRD
from e2e.release import ManagedRelease
from e2e.shared_things import SharedThing

pytestmark = pytest.mark.shared(SharedThing.RELEASE)


@pytest.fixture
def uninstallable(managed_release: ManagedRelease) -> Iterator[ManagedRelease]:
    """The release; whatever the test leaves, it is installed again."""
    yield managed_release
    managed_release.install()


@pytest.mark.quick
def test_the_crd_and_the_models_stay_by_default(
    cluster: Cluster, uninstallable: ManagedRelease, warm_image: None, namespace: str
) -> None:
    cluster.apply(namespace, llmd("orphan"))
    wait_ready(cluster, namespace, "orphan")
    (before,) = pods(cluster, namespace, "orphan")
    uninstallable.uninstall()
    assert not uninstallable.pods()
    assert cluster.find("crd", CRD) is not None
    assert read(cluster, namespace, "orphan")["metadata"]["name"] == "orphan"
    (after,) = pods(cluster, namespace, "orphan")
    assert after["metadata"]["uid"] == before["metadata"]["uid"], "it serves on without an operator"
    uninstallable.install()
    cluster.kubectl("scale", "llmd/orphan", "-n", namespace, "--replicas=2")
    wait_ready(cluster, namespace, "orphan")
    assert before["metadata"]["uid"] in [pod["metadata"]["uid"] for pod in pods(cluster, namespace, "orphan")]


def test_with_keep_off_the_crd_goes_and_takes_the_models_along(
    cluster: Cluster, uninstallable: ManagedRelease, warm_image: None, namespace: str
) -> None:
    uninstallable.install("crds.keep=false")
    cluster.apply(namespace, llmd("gone"))
    wait_ready(cluster, namespace, "gone")
    uninstallable.uninstall()
    eventually(lambda: cluster.find("crd", CRD), lambda found: found is None, what="no CRD")
    eventually(
        lambda: cluster.items("pods", "-n", namespace, "-l", "millstream.dev/deployment=gone"),
        lambda found: not found,
        what="no pod: the garbage collector needs no operator",
        timeout_seconds=120,
    )
