"""`accelerator.products` names GPUs that no node has: planned as an autoscaler's nodes, whatever else is there."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT
from tests.support.fake_operator import FakeOperator, world
from tests.support.gpu_nodes import A100, L4, T4, gpu_node, gpu_pod, spec_on_gpu
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
LARGE = {"model": {"source": {"huggingFace": {"repository": "meta-llama/Meta-Llama-3-70B-Instruct"}}}}


async def planned(*objects: Manifest, products: list[str], **spec: Any) -> FakeOperator:
    cluster = world(manifest(**spec_on_gpu(**(LARGE | spec), accelerator={"type": "GPU", "products": products})))
    for one in objects:
        cluster.put(one)
    operator = FakeOperator(cluster)
    await operator.settle(roll_out=False)
    return operator


def plan(operator: FakeOperator) -> Manifest:
    found: Manifest = operator.status()["plan"]
    return found


def waits(operator: FakeOperator) -> str:
    return " ".join(one["reason"] for one in plan(operator)["reasons"] if one["field"] == "inventory")


@pytest.mark.parametrize(
    "nodes",
    [(), (gpu_node("small", T4, 4),), (gpu_node("small", T4, 4), gpu_node("other", L4, 1))],
    ids=["no GPU node", "an unsuitable one", "two unsuitable ones"],
)
async def test_a_product_at_zero_is_planned_whatever_other_nodes_there_are(nodes: tuple[Manifest, ...]) -> None:
    operator = await planned(*nodes, products=["A100-80GB"])
    assert (plan(operator)["accelerator"], plan(operator)["tensorParallelSize"]) == ("A100-80GB", 4)
    assert "pods wait until there is such a node." in waits(operator)
    selected = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert A100 in str(selected), "an autoscaler must bring such a node"


async def test_a_node_that_suits_comes_before_one_that_is_not_there() -> None:
    operator = await planned(gpu_node("a", A100, 8), products=["H100", "A100-80GB"])
    assert plan(operator)["accelerator"] == "A100-80GB"
    assert waits(operator) == ""


async def test_a_node_that_others_hold_comes_before_one_that_is_not_there() -> None:
    operator = await planned(gpu_node("a", A100, 8), gpu_pod("p", "a", 8), products=["H100", "A100-80GB"])
    assert plan(operator)["accelerator"] == "A100-80GB"
    assert "are taken" in waits(operator)


async def test_of_two_products_the_absent_one_is_taken_where_the_present_one_is_too_small() -> None:
    operator = await planned(gpu_node("a", T4, 1), products=["T4", "H100"])
    assert plan(operator)["accelerator"] == "H100-80GB"
    assert waits(operator).startswith("No node that counts has H100-80GB.")


async def test_a_product_that_is_too_small_is_refused_with_what_is_missing_before_a_node_comes() -> None:
    operator = await planned(gpu_node("a", A100, 8), products=["L4"])
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Infeasible")
    assert "GB are missing" in ready["message"]
    fixes = {fix["field"]: fix["value"] for fix in plan(operator)["fixes"]}
    assert fixes["accelerator.products"] == "A100-80GB", "the node that is there would do"
