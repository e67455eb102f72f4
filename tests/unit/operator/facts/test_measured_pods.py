"""Only ready pods of the ReplicaSet that runs the revision measure anything, each within the cap."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream_operator.kube.kinds import POD
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, answer_to
from tests.support.measured_models import (
    MEASURED,
    Manifest,
    entries,
    gpu_world,
    measured,
)


def serving_pod(cluster: FakeCluster) -> Manifest:
    (pod,) = [one for one in cluster.all(POD) if one["metadata"]["labels"].get("millstream.dev/role") == "leader"]
    return pod


def not_of_the_replica_set(pod: Manifest) -> None:
    pod["metadata"]["ownerReferences"][0]["uid"] = "forged"


def of_no_controller(pod: Manifest) -> None:
    del pod["metadata"]["ownerReferences"]


def of_a_namesake(pod: Manifest) -> None:
    pod["metadata"]["ownerReferences"][0]["kind"] = "Job"


@pytest.mark.parametrize("forge", [not_of_the_replica_set, of_no_controller, of_a_namesake])
async def test_a_pod_that_is_not_the_deployments_own_measures_nothing(forge: Callable[[Manifest], None]) -> None:
    """It has the labels, it is ready, and it answers behind the Service with the right configuration."""
    cluster = gpu_world()
    operator = FakeOperator(cluster)
    await operator.turn()
    cluster.run_jobs(answer_to)
    await operator.turn()
    cluster.roll_out()
    cluster.edit(POD, serving_pod(cluster)["metadata"]["name"], forge)
    operator.model.ready = {"phase": "Ready", "memory": MEASURED}
    await operator.settle(roll_out=False)
    assert operator.condition("Ready")["status"] == "True"
    assert "measured" not in operator.status()["memory"]
    assert entries(cluster) == {}


async def test_what_the_service_answers_is_no_measurement() -> None:
    cluster = gpu_world()
    operator = FakeOperator(cluster)
    operator.model.ready = {"phase": "Ready", "memory": MEASURED}
    await operator.turn()
    cluster.run_jobs(answer_to)
    await operator.turn()
    cluster.roll_out()
    own = {**MEASURED, "graphs_bytes": 150_000_000}
    hashed = operator.model.running(serving_pod(cluster)["metadata"]["labels"])
    operator.pods.reports[serving_pod(cluster)["metadata"]["name"]] = hashed | {"memory": own}
    await operator.settle()
    assert operator.status()["memory"]["measured"]["graphsBytes"] == 150_000_000


async def test_a_pod_of_another_configuration_measures_nothing() -> None:
    cluster = gpu_world()
    operator = FakeOperator(cluster)
    await operator.turn()
    cluster.run_jobs(answer_to)
    await operator.turn()
    cluster.roll_out()
    answer = {"phase": "Ready", "config_hash": "other", "memory": MEASURED}
    operator.pods.reports[serving_pod(cluster)["metadata"]["name"]] = answer
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert entries(cluster) == {}


async def test_what_is_beyond_the_cap_is_logged_once_with_the_pods_name(caplog: pytest.LogCaptureFixture) -> None:
    cluster = gpu_world()
    operator = await measured(cluster, graphs_bytes=1_400_000_000)
    for _ in range(3):
        operator.seconds += 1000
        await operator.settle()
    said = [one.getMessage() for one in caplog.records if "does not keep" in one.getMessage()]
    assert len(said) == 1
    assert f"pod {serving_pod(cluster)['metadata']['name']} measured: graphs: 1.40 GB" in said[0]
