"""A spec with a budget, and nodes that do not count: the edit that includes them is offered."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.plan_inputs import ClusterObjects
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from tests.support.cluster_trials import try_cluster
from tests.support.gpu_nodes import A100, L4, MODEL, gpu_node, gpu_pod
from tests.support.llmdeployments import manifest
from tests.support.random_clusters import TAINT, RandomCluster

Manifest = dict[str, Any]
QWEN_14B = "Qwen/Qwen2.5-14B-Instruct"
TOLERATIONS = "podTemplate.spec.tolerations"
ONE_GPU: Manifest = {"parallelism": {"tensor": 1}}


def deployment_of(model: str, monthly_usd: int, **spec: Any) -> LLMDeployment:
    source = {"source": {"huggingFace": {"repository": model}}}
    return parse(manifest(model=source, accelerator={"type": "GPU"}, budget={"maxMonthlyUSD": monthly_usd}, **spec))


def decided(deployment: LLMDeployment, *nodes: Manifest) -> Plan | Infeasible:
    shape = known_shape(MODEL)
    assert shape is not None
    facts = ClusterObjects(nodes, ()).facts(deployment, load_catalog(), shape)
    return decide(deployment, PlanDefaults("image"), facts)


@pytest.mark.parametrize("spec", [ONE_GPU, {}], ids=["size given", "fits on any GPU"])
def test_the_edit_that_includes_a_tainted_node_is_offered(spec: Manifest) -> None:
    refused = decided(deployment_of(MODEL, 2000, **spec), gpu_node("node-0", L4, 1, taints=[TAINT]))
    assert isinstance(refused, Infeasible), "a plan that needs to know the GPUs is never applied"
    assert "Node node-0 is left out: the pods do not tolerate the taint team=search:NoSchedule." in refused.message
    assert [fix.field for fix in refused.fixes] == [TOLERATIONS]


def test_random_cluster_200_is_refused_with_a_toleration_and_a_larger_budget() -> None:
    """14B on the only A100-80GB of a tainted node, whose GPU a pod holds, for $2,000 a month: the GPU costs more."""
    nodes, pods = (gpu_node("node-0", A100, 1, taints=[TAINT]),), (gpu_pod("pod-0", "node-0"),)
    trial = try_cluster(RandomCluster(200, QWEN_14B, deployment_of(QWEN_14B, 2000, **ONE_GPU), nodes, pods))
    assert (trial.outcome, trial.problems) == ("refused with fixes", [])


def test_nodes_of_an_unknown_product_are_refused_with_what_tells_it() -> None:
    """A size in the spec would not do: what the GPUs cost is not known. Nor would fewer replicas."""
    unlabelled = gpu_node("node-0", "", 1)
    refused = decided(deployment_of(MODEL, 2000, replicas=3, **ONE_GPU), unlabelled)
    assert isinstance(refused, Infeasible)
    assert refused.message.endswith(
        "Whether GPUs keep the objectives, the load and the budget depends on their product, which is not known. "
        "Install GPU feature discovery, or label the nodes (such as kubectl label node node-0 "
        "nvidia.com/gpu.product=NVIDIA-A100-SXM4-80GB)."
    )


def test_without_any_node_what_is_missing_is_the_inventory() -> None:
    plan = decided(deployment_of(MODEL, 2000, **ONE_GPU))
    assert isinstance(plan, Plan)
    assert plan.requires == ("inventory",)


def test_a_spec_without_a_budget_is_planned_from_itself() -> None:
    source = {"source": {"huggingFace": {"repository": MODEL}}}
    plain = parse(manifest(model=source, accelerator={"type": "GPU"}, **ONE_GPU))
    plan = decided(plain, gpu_node("node-0", L4, 1, taints=[TAINT]))
    assert isinstance(plan, Plan)
    assert plan.requires == ()
