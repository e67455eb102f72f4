"""Planning from the cluster's GPUs. The nodes are fakes: objects with GPUs, cordoned, so that no pod ever runs there.

A cordoned node is one that the cluster has, so plans are made for it and wait. Nothing here needs a GPU.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import condition, llmd, read
from e2e.release import Release
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing
from tests.support.known_models import known_config

pytestmark = pytest.mark.shared(SharedThing.NODES)
MODEL = "meta-llama/Llama-3.2-1B-Instruct"
L4, T4 = "NVIDIA-L4", "Tesla-T4"
# Plans are looked at again within a minute after nodes have changed.
LOOK_TIMEOUT_SECONDS = 150.0


@pytest.fixture
def add_node(cluster: Cluster) -> Iterator[Callable[[str, int], None]]:
    """Add a fake node with so many GPUs of a product; the nodes are gone after the test."""
    added: list[str] = []

    def add(product: str, gpus: int) -> None:
        name = f"e2e-gpu-{secrets.token_hex(3)}"
        labels = {"nvidia.com/gpu.product": product, LEFTOVER_LABEL: LEFTOVER_VALUE}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(node | {"spec": {"unschedulable": True}}))
        added.append(name)
        counts = {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"}
        status = json.dumps({"status": {"allocatable": counts, "capacity": counts}})
        cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", status)

    yield add
    for name in added:
        cluster.kubectl("delete", "node", name, "--wait=false")


def on_a_gpu(name: str, **spec: Any) -> Object:
    """The shape is a known model's, from a ConfigMap: its repository is out of reach of a test cluster."""
    model = {"source": {"local": {"path": MODEL.lower()}}, "configMapRef": {"name": "shape", "key": "config.json"}}
    return llmd(name, **({"model": model, "accelerator": {"type": "GPU"}, "engine": {}} | spec))


def shape() -> Object:
    config = {"config.json": json.dumps(known_config(MODEL))}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "shape"}, "data": config}


def plan_of(deployment: Object) -> Object:
    found: Object = (deployment.get("status") or {}).get("plan") or {}
    return found


def planned(cluster: Cluster, namespace: str, name: str, summary: str, timeout_seconds: float = 180.0) -> Object:
    return eventually(
        lambda: read(cluster, namespace, name),
        lambda found: plan_of(found).get("summary") == summary,
        what=f"{name} planned as {summary}",
        timeout_seconds=timeout_seconds,
    )


def workload_of(cluster: Cluster, namespace: str, name: str) -> Object:
    """The Deployment of pods. It is made after the plan is in the status, so it may take a moment."""
    found = eventually(
        lambda: cluster.find("deployment", name, "-n", namespace),
        lambda found: found is not None,
        what=f"{name}'s pods",
    )
    assert found is not None
    return found


def test_a_plan_is_made_for_the_clusters_gpus_and_waits_for_them(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, add_node: Callable[[str, int], None]
) -> None:
    add_node(L4, 2)
    cluster.apply(namespace, shape(), on_a_gpu("waits"))
    plan = plan_of(planned(cluster, namespace, "waits", "1×L4-24GB TP1 BF16"))
    assert any("pods wait" in reason["reason"] for reason in plan["reasons"] if reason["field"] == "inventory")
    assert plan["memory"]["kvCacheBytes"] > 0
    assert plan["factsHash"]
    workload = workload_of(cluster, namespace, "waits")
    assert L4 in json.dumps(workload["spec"]["template"]["spec"]["affinity"])


def test_budgets_need_gpus_that_are_known(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, add_node: Callable[[str, int], None]
) -> None:
    cluster.apply(namespace, shape(), on_a_gpu("cheap", budget={"maxMonthlyUSD": 1000}))
    refused = eventually(
        lambda: condition(read(cluster, namespace, "cheap"), "Planned"),
        lambda found: found.get("reason") == "UnsupportedByRuntime",
        what="cheap refused",
    )
    assert refused["status"] == "False"
    assert "(inventory)" in refused["message"]
    add_node(L4, 1)
    planned(cluster, namespace, "cheap", "1×L4-24GB TP1 BF16", LOOK_TIMEOUT_SECONDS)


def test_a_node_on_which_no_pod_could_start_outdates_no_plan(
    cluster: Cluster, release: Release, warm_image: None, namespace: str, add_node: Callable[[str, int], None]
) -> None:
    """The fake nodes are cordoned, so a plan for them could not start: it is no gain, under FollowOperator neither."""
    add_node(L4, 4)
    cluster.apply(namespace, shape(), on_a_gpu("kept"), on_a_gpu("follows", runtime={"updatePolicy": "FollowOperator"}))
    for name in ("kept", "follows"):
        planned(cluster, namespace, name, "1×L4-24GB TP1 BF16")
    generation = workload_of(cluster, namespace, "kept")["metadata"]["generation"]
    add_node(T4, 4)
    cluster.apply(namespace, on_a_gpu("new"))
    planned(cluster, namespace, "new", "1×T4-16GB TP1 BF16", LOOK_TIMEOUT_SECONDS)  # the operator has seen the node
    for name in ("kept", "follows"):
        found = planned(cluster, namespace, name, "1×L4-24GB TP1 BF16")
        assert condition(found, "PlanOutdated") == {}
        assert "PlanAdopted" not in [entry["type"] for entry in found["status"].get("decisions", [])]
    assert workload_of(cluster, namespace, "kept")["metadata"]["generation"] == generation
