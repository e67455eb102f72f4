"""Nodes that do not count, next to others that do: a verdict names those that would hold the model, and the edit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.fix_trials import merged
from tests.support.gpu_nodes import A100, L4, T4, gpu_node, gpu_pod, spec_on_gpu
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
LARGE = {"model": {"source": {"huggingFace": {"repository": "meta-llama/Meta-Llama-3-70B-Instruct"}}}}
SMALL = gpu_node("small", T4, 1)
SEARCH = {"key": "dedicated", "value": "search", "effect": "NoSchedule"}
BATCH = {"key": "batch", "effect": "NoExecute"}
TOLERATION = "add {key: dedicated, operator: Equal, value: search, effect: NoSchedule} to podTemplate.spec.tolerations."


async def in_a_cluster(*objects: Manifest, **spec: Any) -> FakeOperator:
    cluster = world(manifest(**spec_on_gpu(**(LARGE | spec))))
    for one in objects:
        cluster.put(one)
    operator = FakeOperator(cluster)
    await operator.settle(roll_out=False)
    return operator


def about_nodes(operator: FakeOperator) -> list[str]:
    return [one["reason"] for one in operator.status()["plan"]["reasons"] if one["field"] == "nodes"]


async def test_a_refusal_names_the_tainted_node_that_would_do_and_the_toleration() -> None:
    operator = await in_a_cluster(SMALL, gpu_node("large", A100, 8, taints=[SEARCH]))
    message = operator.condition("Ready")["message"]
    assert "Node large is left out: the pods do not tolerate the taint dedicated=search:NoSchedule." in message
    assert "The model would fit there as 4×A100-80GB TP4" in message
    assert TOLERATION in message


async def test_a_node_that_would_not_hold_the_model_comes_without_an_edit() -> None:
    operator = await in_a_cluster(SMALL, gpu_node("other", L4, 1, taints=[SEARCH]))
    message = operator.condition("Ready")["message"]
    assert "Node other is left out: the pods do not tolerate the taint dedicated=search:NoSchedule." in message
    assert "podTemplate" not in message


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"budget": {"maxMonthlyUSD": 1}}, "either: costs $5,009 a month, and budget.maxMonthlyUSD is 1. Name"),
        ({"objectives": {"itl": {"p95": "1ms"}}}, "objective 1 ms. Name"),
        ({"replicas": 5}, "either: 5 replicas need 10 A100-80GB in groups of 2; there is room for 4. Name"),
    ],
)
async def test_what_keeps_a_model_from_left_out_nodes_that_hold_its_weights_is_said(spec: Manifest, said: str) -> None:
    message = (await in_a_cluster(gpu_node("large", A100, 8, taints=[SEARCH]), **spec)).condition("Ready")["message"]
    assert "There is no plan with them either: " in message
    assert said in message
    assert "would not fit" not in message


async def test_a_size_that_the_model_does_not_allow_is_refused_where_the_gpus_are_not_known() -> None:
    message = (await in_a_cluster(parallelism={"tensor": 3})).condition("Ready")["message"]
    assert message == (
        "parallelism.tensor is 3: 3 does not divide the model's 64 attention heads. The model allows 1, 2, 4, 8, 16."
    )
    operator = await in_a_cluster(parallelism={"tensor": 4})
    assert operator.condition("Planned")["status"] == "True"


async def test_the_toleration_is_an_edit_that_is_applied() -> None:
    operator = await in_a_cluster(SMALL, gpu_node("large", A100, 8, taints=[SEARCH, BATCH]))
    fixes = operator.status()["plan"]["fixes"]
    (fix,) = [fix for fix in fixes if fix["field"] == "podTemplate.spec.tolerations"]
    assert fix["value"] == "dedicated=search:NoSchedule and batch:NoExecute"
    stored = manifest(**spec_on_gpu(**LARGE))
    respec(operator.cluster, **merged(stored, json.loads(fix["patch"]))["spec"])
    await operator.settle(roll_out=False)
    assert operator.condition("Planned")["status"] == "True"
    assert operator.status()["plan"]["accelerator"] == "A100-80GB"


@pytest.mark.parametrize("others", [(), (SMALL,)], ids=["alone", "next to a usable node"])
async def test_labels_that_the_node_selector_asks_for_are_named_with_the_command(others: tuple[Manifest, ...]) -> None:
    wanted = {"podTemplate": {"spec": {"nodeSelector": {"pool": "llm", "zone": "a"}}}}
    small = [gpu_node("small", T4, 1, labels={"pool": "llm", "zone": "a"})] if others else []
    operator = await in_a_cluster(*small, gpu_node("large", A100, 8, labels={"zone": "a"}), **wanted)
    message = operator.condition("Ready")["message"]
    assert "Node large is left out: no label pool=llm, which the pods' nodeSelector asks for." in message
    assert "kubectl label node large pool=llm" in message


async def test_all_that_keeps_pods_from_a_node_is_said_at_once() -> None:
    wanted = {"podTemplate": {"spec": {"nodeSelector": {"pool": "llm"}}}}
    usable = gpu_node("small", T4, 1, labels={"pool": "llm"})
    operator = await in_a_cluster(usable, gpu_node("large", A100, 8, taints=[SEARCH, BATCH]), **wanted)
    message = operator.condition("Ready")["message"]
    assert "taints dedicated=search:NoSchedule and batch:NoExecute" in message
    assert "kubectl label node large pool=llm" in message
    assert "{key: batch, operator: Exists, effect: NoExecute}" in message


async def test_a_plan_that_waits_names_the_nodes_on_which_it_would_not() -> None:
    held = (gpu_node("a", A100, 8), gpu_pod("p", "a", 8))
    tainted, cordoned = gpu_node("b", A100, 8, taints=[SEARCH]), gpu_node("c", A100, 8, unschedulable=True)
    said = about_nodes(await in_a_cluster(*held, tainted, cordoned))
    assert any(
        sentence.endswith(f"The model would fit there as 4×A100-80GB TP4 BF16: {TOLERATION}") for sentence in said
    )
    assert any(sentence.endswith("run kubectl uncordon c.") for sentence in said)


async def test_a_left_out_node_whose_gpus_are_held_is_no_way_out_of_waiting() -> None:
    held = (gpu_node("a", A100, 8), gpu_pod("p", "a", 8))
    operator = await in_a_cluster(*held, gpu_node("b", A100, 8, taints=[SEARCH]), gpu_pod("q", "b", 7))
    (sentence,) = about_nodes(operator)
    assert sentence.endswith("dedicated=search:NoSchedule.")


@pytest.mark.parametrize("others", [(), (SMALL,)], ids=["alone", "next to a usable node"])
async def test_a_plan_for_named_products_says_how_to_use_the_tainted_node(others: tuple[Manifest, ...]) -> None:
    products = {"accelerator": {"type": "GPU", "products": ["A100-80GB"]}}
    operator = await in_a_cluster(*others, gpu_node("large", A100, 8, taints=[SEARCH]), **products)
    assert operator.status()["plan"]["accelerator"] == "A100-80GB"
    (sentence,) = about_nodes(operator)
    assert sentence.endswith(TOLERATION)


async def test_a_plan_that_needs_none_of_them_is_not_instructed() -> None:
    operator = await in_a_cluster(gpu_node("mine", A100, 8), gpu_node("theirs", A100, 8, taints=[SEARCH]))
    assert about_nodes(operator) == [
        "Node theirs is left out: the pods do not tolerate the taint dedicated=search:NoSchedule."
    ]


async def test_an_unlabelled_node_next_to_others_says_how_to_label_it() -> None:
    unlabelled = gpu_node("large", A100, 8)
    unlabelled["metadata"]["labels"] = {}
    message = (await in_a_cluster(SMALL, unlabelled)).condition("Ready")["message"]
    assert "kubectl label node large nvidia.com/gpu.product=" in message
    assert "set parallelism.tensor" not in message, "that plans nothing while other GPUs are known"
