"""Fixes are near: the least change of a number, the fewest GPUs, the field that binds; the nearest is offered first."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.inventory.node_kinds import NodeKind
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, with_field
from millstream_operator.planning.fixes.nearness import nearness
from millstream_operator.planning.plan import Fix, Infeasible, Plan
from millstream_operator.planning.planner import decide
from millstream_operator.planning.scaling_cost import over_budget
from tests.support.llmdeployments import deployment
from tests.unit.operator.planning.cases import CASES, CATALOG, DEFAULTS, LLAMA_8B, LLAMA_70B, Case, infeasible

LONG_8B = "meta-llama/Llama-3.1-8B-Instruct"
ONE_L4_USD = 588  # a month
AUTOSCALED = "autoscaling: {{minReplicas: {}, maxReplicas: {}}}\nreplicas: {}\nbudget: {{maxMonthlyUSD: {}}}\n"
SHORT = "engine: {maxModelLen: 2048}\n"


def refused(case: Case) -> Infeasible:
    found = case.plan()
    assert isinstance(found, Infeasible)
    return found


def fix_of(case: Case, field: str) -> Fix:
    found = [fix for fix in refused(case).fixes if fix.field == field]
    assert found, [fix.field for fix in refused(case).fixes]
    return found[0]


def with_value(case: Case, path: str, value: Any) -> Plan | Infeasible:
    return decide(with_field(case.deployment(), path, value), DEFAULTS, case.facts())


# Numbers


def test_the_context_is_shortened_no_more_than_needed() -> None:
    case = infeasible(LONG_8B, ("L4:1",), "engine: {maxModelLen: 131072}")
    length = int(fix_of(case, "engine.maxModelLen").value)
    assert length > 131072 // 8, "halving alone ends there"
    assert isinstance(with_value(case, "engine.maxModelLen", length), Plan)
    assert isinstance(with_value(case, "engine.maxModelLen", length + 1024), Infeasible)


def test_as_many_replicas_as_there_is_room_for() -> None:
    case = infeasible(LLAMA_8B, ("L4:8",), f"replicas: 40\n{SHORT}")
    assert fix_of(case, "replicas").value == "8"


def test_latencies_are_loosened_to_the_fastest_plan_and_to_the_cheapest() -> None:
    case = infeasible(LLAMA_70B, ("A100-80GB:8",), "objectives: {ttft: {p95: 20ms}}")
    fast, cheap = [fix for fix in refused(case).fixes if fix.field == "objectives.ttft.p95"]
    assert int(fast.value.removesuffix("ms")) < int(cheap.value.removesuffix("ms"))
    tighter = f"{int(fast.value.removesuffix('ms')) - 1}ms"
    assert isinstance(with_value(case, "objectives.ttft.p95", tighter), Infeasible)


def test_the_budget_is_the_smallest_that_pays_for_a_plan() -> None:
    case = infeasible(LLAMA_8B, ("A100-80GB:8", "L4:8"), f"budget: {{maxMonthlyUSD: 100}}\n{SHORT}")
    usd = int(fix_of(case, "budget.maxMonthlyUSD").value)
    assert usd == ONE_L4_USD
    assert isinstance(with_value(case, "budget.maxMonthlyUSD", usd - 1), Infeasible)


# GPUs


@pytest.mark.parametrize(
    ("gpus", "spec", "wanted"),
    [
        (("L4:1",), "replicas: 3\n", "L4-24GB:2"),
        (("L4:4",), "replicas: 5\n", "L4-24GB:1"),
        (("L4:8",), "replicas: 18\n", "3 nodes of L4-24GB:4"),  # ten GPUs, in equal nodes
        (("L4:4",), "replicas: 4\nworkload: {profile: Chat}\naccelerator: {products: [A10G]}\n", "A10G-24GB:4"),
    ],
)
def test_only_the_gpus_that_are_missing_are_offered(gpus: tuple[str, ...], spec: str, wanted: str) -> None:
    case = infeasible(LLAMA_8B, gpus, spec + SHORT)
    assert wanted in {fix.value for fix in refused(case).fixes if fix.adds_nodes}


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_one_gpu_fewer_than_offered_is_not_enough(replicas: int) -> None:
    case = infeasible(LLAMA_8B, ("L4:1",), f"replicas: {replicas}\n{SHORT}")
    (fix,) = [fix for fix in refused(case).fixes if fix.field == "gpus" and fix.value.startswith("L4")]
    gpus = int(fix.value.partition(":")[2])
    assert isinstance(decide(case.deployment(), DEFAULTS, _with_node(case.facts(), "L4-24GB", gpus)), Plan)
    assert isinstance(decide(case.deployment(), DEFAULTS, _with_node(case.facts(), "L4-24GB", gpus - 1)), Infeasible)


def _with_node(facts: Facts, product: str, gpus: int) -> Facts:
    part = CATALOG.get(product)
    assert part is not None
    assert facts.inventory is not None
    kinds = (*facts.inventory.kinds, NodeKind(part, gpus, 1)) if gpus else facts.inventory.kinds
    return replace(facts, inventory=replace(facts.inventory, kinds=kinds))


# What binds under autoscaling


def test_under_autoscaling_a_budget_fix_edits_its_limit() -> None:
    case = infeasible(LLAMA_8B, ("L4:8", "L4:8"), AUTOSCALED.format(1, 10, 5, 3 * ONE_L4_USD + 10) + SHORT)
    fields = {fix.field for fix in refused(case).fixes}
    assert "replicas" not in fields, "the autoscaler would write it again"
    assert fix_of(case, "autoscaling.maxReplicas").value == "3"


def test_a_limit_below_the_minimum_moves_both() -> None:
    case = infeasible(LLAMA_8B, ("L4:8", "L4:8"), AUTOSCALED.format(4, 10, 5, 3 * ONE_L4_USD + 10) + SHORT)
    fix = fix_of(case, "autoscaling.maxReplicas, autoscaling.minReplicas")
    assert fix.value == "3, 3"
    assert json.loads(fix.patch or "")["spec"]["autoscaling"] == {"minReplicas": 3, "maxReplicas": 3}


def test_under_autoscaling_the_budget_that_is_offered_pays_for_its_limit() -> None:
    case = infeasible(LLAMA_8B, ("L4:8", "L4:8"), AUTOSCALED.format(1, 10, 5, 1000) + SHORT)
    budget = int(fix_of(case, "budget.maxMonthlyUSD").value)
    planned = with_value(case, "budget.maxMonthlyUSD", budget)
    assert isinstance(planned, Plan)
    changed = with_field(case.deployment(), "budget.maxMonthlyUSD", budget)
    assert over_budget(planned.status_plan(), changed.spec) is None


def test_an_autoscaler_over_budget_is_given_limits_that_the_api_accepts() -> None:
    status = {"cost": {"hourlyMilliUSD": 1000}, "replicas": 1}
    owner = deployment(accelerator={}, budget={"maxMonthlyUSD": 1500}, autoscaling={"minReplicas": 4, "maxReplicas": 8})
    assert "set minReplicas and maxReplicas to 2 or less" in (over_budget(status, owner.spec) or "")
    owner = deployment(accelerator={}, budget={"maxMonthlyUSD": 100}, autoscaling={"minReplicas": 1, "maxReplicas": 8})
    assert "raise it to 5840." in (over_budget(status, owner.spec) or "")


# The order


def test_the_nearest_edit_comes_first() -> None:
    spec = "engine: {maxModelLen: 131072}\naccelerator: {products: [L4]}"
    case = infeasible(LONG_8B, ("L4:1", "A100-80GB:1"), spec)
    fields = [fix.field for fix in refused(case).fixes if not fix.adds_nodes]
    assert fields[0] == "accelerator.products", "no client is promised a product"


def test_fewer_bits_come_last_and_more_money_before_them() -> None:
    case = infeasible(LLAMA_8B, ("L4:8",), f"replicas: 8\nbudget: {{maxMonthlyUSD: 1000}}\n{SHORT}")
    fields = [fix.field for fix in refused(case).fixes if not fix.adds_nodes]
    assert fields[:2] == ["replicas", "budget.maxMonthlyUSD"]


@pytest.mark.parametrize("name", ["no-memory-8b-long-context", "no-latency", "no-budget", "no-startup-for-70b"])
def test_each_offered_order_is_that_of_nearness(name: str) -> None:
    case = CASES[name]
    edits = [fix for fix in refused(case).fixes if not fix.adds_nodes]
    ranks = [nearness(Change(((fix.field, fix.value),), case.deployment(), case.facts()), "None")[0] for fix in edits]
    assert ranks == sorted(ranks)


# Layouts


def test_an_itl_is_given_with_its_number_of_requests() -> None:
    """Layouts hold different numbers of requests, so their ITL alone cannot be compared."""
    plan = Case(LLAMA_8B, ("H100:8", "A100-80GB:4"), "engine: {maxModelLen: 4096}").plan()
    assert isinstance(plan, Plan)
    assert plan.predicted is not None
    lines = [line.reason for line in plan.rejected if "predicted ITL" in line.reason]
    assert lines
    for line in lines:
        assert line.count("at once") == 2
        assert f"with {plan.predicted.concurrent_sequences} request" in line
