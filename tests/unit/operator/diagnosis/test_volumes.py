"""Claims that two nodes cannot mount are refused by name before a pod waits; an unused cache is deleted."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, PERSISTENT_VOLUME_CLAIM
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, answer_of, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
CLAIM = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "chat"}}}


def cached(**cache: Any) -> Manifest:
    return {"source": {"huggingFace": {"repository": "org/name"}}, "cache": {"size": "20Gi", **cache}}


def user_claim(cluster: FakeCluster, *modes: str) -> None:
    cluster.put(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": "team"},
            "spec": {"accessModes": list(modes)},
        }
    )


async def on_a_claim(*modes: str, replicas: int) -> FakeOperator:
    operator = FakeOperator(world(manifest(model=CLAIM, replicas=replicas)))
    if modes:
        user_claim(operator.cluster, *modes)
    for _ in range(4):
        await operator.turn()
        operator.cluster.run_jobs(answer_of(None))
    return operator


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
async def test_replicas_on_a_claim_for_one_node_are_refused_with_the_field_the_value_and_the_fix(mode: str) -> None:
    operator = await on_a_claim(mode, replicas=2)
    found = operator.condition("Ready")
    assert found["reason"] == "Infeasible"
    for words in ("spec.replicas is 2", "models", mode, "ReadOnlyMany or ReadWriteMany"):
        assert words in found["message"]
    assert operator.cluster.get(DEPLOYMENT, "demo") is None


@pytest.mark.parametrize(
    ("modes", "replicas"), [(("ReadWriteOnce",), 1), (("ReadOnlyMany",), 3), (("ReadWriteOnce", "ReadWriteMany"), 2)]
)
async def test_what_the_pods_can_mount_is_served(modes: tuple[str, ...], replicas: int) -> None:
    operator = await on_a_claim(*modes, replicas=replicas)
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "Ready"


async def test_scaling_up_is_refused_and_what_serves_stays() -> None:
    operator = await on_a_claim("ReadWriteOnce", replicas=1)
    await operator.settle()
    respec(operator.cluster, replicas=2)
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "Infeasible"
    assert operator.condition("Available")["status"] == "True"
    assert operator.cluster.the(DEPLOYMENT)["spec"]["replicas"] == 1
    respec(operator.cluster, replicas=1)
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "Ready"


async def test_the_users_claim_is_read_once_and_never_written() -> None:
    operator = await on_a_claim("ReadWriteMany", replicas=2)
    await operator.settle()
    operator.client.requests.clear()
    await operator.turn()
    assert operator.client.requests == []
    assert ("apply", "PersistentVolumeClaim") not in operator.writes


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
async def test_a_cache_for_one_node_is_refused_while_rollouts_bring_up_a_second_pod(mode: str) -> None:
    operator = FakeOperator(world(manifest(model=cached(accessMode=mode))))
    for _ in range(4):
        await operator.turn()
        operator.cluster.run_jobs(answer_of())
    found = operator.condition("Ready")
    assert found["reason"] == "Infeasible"
    assert f"model.cache.accessMode is {mode}" in found["message"]
    assert operator.cluster.get(PERSISTENT_VOLUME_CLAIM, "demo-model-cache") is None


async def test_a_cache_for_one_node_serves_where_rollouts_replace_in_place() -> None:
    stored = manifest(model=cached(accessMode="ReadWriteOnce"), rollout={"strategy": "ResourceAware"})
    operator = await served(stored)
    claim = operator.cluster.the(PERSISTENT_VOLUME_CLAIM, "demo-model-cache")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


async def test_a_cache_is_made_grown_and_deleted_when_no_old_pod_needs_it() -> None:
    operator = await served(manifest(model=cached()))
    cluster = operator.cluster
    claim = cluster.the(PERSISTENT_VOLUME_CLAIM, "demo-model-cache")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    respec(cluster, model=cached(size="40Gi"))
    await operator.settle()
    claim = cluster.the(PERSISTENT_VOLUME_CLAIM, "demo-model-cache")
    assert claim["spec"]["resources"] == {"requests": {"storage": "40Gi"}}
    respec(cluster, model={"source": cached()["source"]})
    await operator.turn()
    await operator.turn()
    assert cluster.get(PERSISTENT_VOLUME_CLAIM, "demo-model-cache") is not None, "the old pods still load from it"
    await operator.settle()
    assert cluster.get(PERSISTENT_VOLUME_CLAIM, "demo-model-cache") is None


async def test_a_claim_that_is_there_already_and_does_not_fit_is_named() -> None:
    """As after an API server that did not compare: the schema was older, or the cache was away for a while."""
    operator = await served(manifest(model=cached()))
    respec(operator.cluster, model=cached(size="10Gi"))
    await operator.turn()
    found = operator.condition("Ready")
    assert found["reason"] == "InvalidSpec"
    assert "demo-model-cache" in found["message"]
    assert "never shrink" in found["message"]
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["availableReplicas"] == 1
