"""The simulated scheduler of the test kit: it decides as kube-scheduler does, and the operator reads its words."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import POD
from tests.support.fake_cluster import FakeCluster
from tests.support.gpu_nodes import A100, L4, T4, gpu_node, gpu_pod
from tests.support.rollout_world import on_nodes, served_on_nodes
from tests.support.scheduler import NodePool, Scheduler

Manifest = dict[str, Any]
SPOT = {"key": "spot", "value": "true", "effect": "NoSchedule"}


def pod_spec(gpus: int = 1, **spec: Any) -> Manifest:
    return {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]} | spec


def product_affinity(*products: str) -> Manifest:
    expression = {"key": "nvidia.com/gpu.product", "operator": "In", "values": list(products)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def scheduler(*objects: Manifest, pools: tuple[NodePool, ...] = ()) -> Scheduler:
    cluster = FakeCluster()
    for one in objects:
        cluster.put(one)
    return Scheduler(cluster, pools=pools)


@pytest.mark.parametrize(
    ("node", "pod", "fits"),
    [
        (gpu_node("a", gpus=2), pod_spec(2), True),
        (gpu_node("a", gpus=2), pod_spec(3), False),
        (gpu_node("a", unschedulable=True), pod_spec(), False),
        (gpu_node("a", taints=[SPOT]), pod_spec(), False),
        (gpu_node("a", taints=[SPOT]), pod_spec(tolerations=[{"key": "spot", "operator": "Exists"}]), True),
        (gpu_node("a", taints=[SPOT]), pod_spec(tolerations=[{"key": "spot", "value": "false"}]), False),
        (gpu_node("a", labels={"zone": "b"}), pod_spec(nodeSelector={"zone": "b"}), True),
        (gpu_node("a"), pod_spec(nodeSelector={"zone": "b"}), False),
        (gpu_node("a", product=T4), pod_spec(affinity=product_affinity(L4, A100)), False),
        (gpu_node("a", product=A100), pod_spec(affinity=product_affinity(L4, A100)), True),
    ],
)
def test_a_node_takes_a_pod_or_not(node: Manifest, pod: Manifest, fits: bool) -> None:
    assert scheduler(node).nodes_for(pod) == (["a"] if fits else [])


def test_pods_of_others_hold_their_gpus_until_they_have_ended() -> None:
    found = scheduler(gpu_node("a"), gpu_node("b", gpus=2), gpu_pod("theirs", "b"))
    assert found.nodes_for(pod_spec()) == ["a", "b"]
    assert found.nodes_for(pod_spec(2)) == []
    assert found.nodes_for(pod_spec(2), without=["theirs"]) == ["b"]
    found.cluster.edit(POD, "theirs", lambda live: live["status"].update(phase="Succeeded"))
    assert found.nodes_for(pod_spec(2)) == ["b"]


async def test_a_deployment_serves_on_the_node_that_has_its_gpu() -> None:
    one = await served_on_nodes(gpu_node("small", T4), gpu_node("large", L4), gpu_pod("theirs", "large"))
    assert one.nodes() == ["small"]


async def test_the_operator_reads_why_no_node_takes_a_pod() -> None:
    one = on_nodes(gpu_node("a"), gpu_node("b", unschedulable=True), gpu_pod("theirs", "a"))
    await one.settle()
    ready = one.operator.condition("Ready")
    assert ready["reason"] == "InsufficientGPU"
    assert "1 without 1 free nvidia.com/gpu; 1 cordoned" in ready["message"]
    assert "device plugin" not in ready["message"], "there are GPUs: they are taken"


async def test_a_cluster_without_any_gpu_is_told_from_one_whose_gpus_are_taken() -> None:
    """The scheduler's words are the same for both; the operator sees the nodes."""
    one = on_nodes(gpu_node("a", gpus=0), gpu_node("b", gpus=0), parallelism={"tensor": 1})
    await one.settle()
    ready = one.operator.condition("Ready")
    assert ready["reason"] == "InsufficientGPU"
    assert "Of 2 nodes: 2 without 1 free nvidia.com/gpu." in ready["message"]
    assert ready["message"].endswith(
        "No node of the cluster offers nvidia.com/gpu: install NVIDIA's device plugin where nodes have GPUs, add such "
        "nodes, or set accelerator.type: CPU."
    )
    assert one.operator.condition("Reconciling")["status"] == "True", "a node may come"


async def test_a_pod_that_waits_starts_a_node_of_its_pool() -> None:
    pool = NodePool("l4", L4, taints=[SPOT])
    one = on_nodes(gpu_node("a"), gpu_pod("theirs", "a"), pools=[pool])
    await one.settle()
    assert one.controller.available() == [], "its taint is not tolerated"
    tolerated = [{"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
    await one.apply(podTemplate={"spec": {"tolerations": tolerated}})
    assert one.nodes() == ["l4-0"]
    assert not one.scheduler.could_start(one.controller.pods()[0]["spec"]), "the pool has one node at most"
