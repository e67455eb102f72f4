"""A plan that was made without knowing the GPUs is made again when they are known, unless its pods have answered."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, NODE
from millstream_operator.planning import planner
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, world
from tests.support.gpu_nodes import A100, L4, gpu_node, gpu_pod, spec_on_gpu
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
LARGE = "meta-llama/Meta-Llama-3-70B-Instruct"


def plan_of(operator: FakeOperator) -> Manifest:
    plan: Manifest = operator.cluster.the(LLM_DEPLOYMENT)["status"]["plan"]
    return plan


def decisions(operator: FakeOperator) -> list[str]:
    return [entry["type"] for entry in operator.cluster.the(LLM_DEPLOYMENT)["status"].get("decisions", ())]


def label(cluster: FakeCluster, product: str) -> None:
    """What GPU feature discovery does, some seconds after a node has come."""
    cluster.edit(NODE, "a", lambda live: live["metadata"].update(labels={"nvidia.com/gpu.product": product}), "")


async def test_pods_that_wait_for_any_gpu_are_planned_again_when_a_node_comes() -> None:
    operator = FakeOperator(world(manifest(**spec_on_gpu())))
    await operator.settle(roll_out=False)
    assert plan_of(operator)["summary"].startswith("1×GPU TP1")
    operator.cluster.put(gpu_node("a", L4))
    await operator.settle(roll_out=False)
    assert plan_of(operator)["accelerator"] == "L4-24GB"
    assert plan_of(operator)["memory"]
    assert decisions(operator) == ["PlanAdopted"]
    (entry,) = operator.cluster.the(LLM_DEPLOYMENT)["status"]["decisions"]
    assert "because the GPUs were not known when it was planned" in entry["message"]
    restarted = FakeOperator(operator.cluster)
    await restarted.settle(roll_out=False)
    assert restarted.writes == []


@pytest.mark.parametrize("restart", [False, True])
async def test_a_plan_of_one_gpu_that_cannot_hold_the_model_is_made_again(
    monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    """Made by an operator that planned one GPU for any model: 70B with a pod that loads and never answers."""
    cluster = world(manifest(**spec_on_gpu(model={"source": {"huggingFace": {"repository": LARGE}}})))
    unlabelled = gpu_node("a", A100, 8)
    unlabelled["metadata"]["labels"] = {}
    cluster.put(unlabelled)
    operator = FakeOperator(cluster)
    with monkeypatch.context() as older:
        older.setattr(planner, "fits_any_gpu", lambda search, facts: True)
        await operator.settle(roll_out=False)
    assert plan_of(operator)["gpusPerReplica"] == 1
    cluster.put(gpu_pod("loading", "a", 1, **cluster.the(DEPLOYMENT)["spec"]["template"]["metadata"]["labels"]))
    operator = FakeOperator(cluster) if restart else operator
    await operator.settle(roll_out=False)
    assert plan_of(operator)["gpusPerReplica"] == 1, "nothing more is known"
    label(cluster, A100)
    await operator.settle(roll_out=False)
    assert (plan_of(operator)["gpusPerReplica"], plan_of(operator)["accelerator"]) == (4, "A100-80GB")


async def test_what_has_answered_stays_and_is_reported() -> None:
    operator = FakeOperator(world(manifest(**spec_on_gpu())))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    operator.cluster.put(gpu_node("a", L4))
    await operator.settle()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    assert operator.condition("PlanOutdated")["reason"] == "NewFacts"
    assert "when the spec next changes" in operator.condition("PlanOutdated")["message"]
    assert decisions(operator) == []


async def test_a_pod_that_loads_with_the_right_number_of_gpus_is_not_restarted() -> None:
    cluster = world(manifest(**spec_on_gpu()))
    unlabelled = gpu_node("a", L4)
    unlabelled["metadata"]["labels"] = {}
    cluster.put(unlabelled)
    operator = FakeOperator(cluster)
    await operator.settle(roll_out=False)
    before = cluster.the(DEPLOYMENT)["spec"]["template"]
    cluster.put(gpu_pod("loading", "a", 1, **before["metadata"]["labels"]))
    label(cluster, L4)
    await operator.settle(roll_out=False)
    assert cluster.the(DEPLOYMENT)["spec"]["template"] == before
    assert operator.condition("PlanOutdated")["reason"] == "NewFacts"
