"""What replicas cost: shown with the plan by the replicas of now, never pinned with it, and held to the budget."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.planning.plan import Infeasible, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.scaling_cost import (
    affordable_replicas,
    enforced_limit,
    live_reasons,
    over_budget,
    planned_with_scaling_cost,
    replicas_for_load,
    with_scaling_cost,
)
from millstream_operator.planning.spec_plan import plan_from_spec
from tests.support.llmdeployments import deployment
from tests.unit.operator.planning.cases import CASES, DEFAULTS, LLAMA_8B, Case

# Two replicas at $730 a month each.
PLAN: dict[str, Any] = {
    "replicas": 2,
    "cost": {"hourlyMilliUSD": 2000, "monthlyUSD": 1460, "perMillionTokensMilliUSD": 7},
    "reasons": [{"field": "a", "reason": "b"}, {"field": "budget", "reason": "of another day"}],
}


def spec(budget: int | None = None, enforcement: str | None = None, **fields: Any) -> LLMDeploymentSpec:
    limit: dict[str, Any] = {"maxMonthlyUSD": budget} | ({"enforcement": enforcement} if enforcement else {})
    given = {"autoscaling": {"maxReplicas": 8}, "accelerator": {}} | ({"budget": limit} if budget else {}) | fields
    return deployment(**given).spec


@pytest.mark.parametrize(("replicas", "usd"), [(0, 0), (1, 730), (2, 1460), (7, 5110)])
def test_the_cost_follows_the_replicas(replicas: int, usd: int) -> None:
    plan = with_scaling_cost(PLAN, spec(replicas=replicas))
    assert plan["replicas"] == replicas
    assert plan["cost"] == {"hourlyMilliUSD": 1000 * replicas, "monthlyUSD": usd, "perMillionTokensMilliUSD": 7}
    assert PLAN["replicas"] == 2, "the pinned plan is as it was"


def test_the_highest_cost_is_added_to_the_plans_reasons() -> None:
    plan = with_scaling_cost(PLAN, spec())
    assert plan["reasons"] == [
        {"field": "a", "reason": "b"},
        {"field": "autoscaling.maxReplicas", "reason": "Up to 8 replicas: $5,840 a month at most."},
    ]


@pytest.mark.parametrize(("budget", "verdict"), [(5840, "within $5,840."), (5839, "over $5,839.")])
def test_it_is_compared_with_the_budget(budget: int, verdict: str) -> None:
    reasons = {reason.field: reason.reason for reason in live_reasons(PLAN, spec(budget))}
    assert reasons["autoscaling.maxReplicas"].endswith(verdict)
    assert reasons["budget"] == f"$730 a month, within ${budget:,}."


@pytest.mark.parametrize("unknown", [{}, {"replicas": 2}, {"replicas": 0, "cost": {}}])
def test_what_is_not_known_is_not_said(unknown: dict[str, Any]) -> None:
    status_plan = {"reasons": [], **unknown}
    assert with_scaling_cost(status_plan, spec(1)).get("cost") == unknown.get("cost")
    assert with_scaling_cost(status_plan, spec(1))["reasons"] == []
    assert over_budget(status_plan, spec(1)) is None
    assert enforced_limit(status_plan, spec(1)) is None


@pytest.mark.parametrize(("budget", "replicas"), [(729, 0), (730, 1), (1459, 1), (1460, 2), (7300, 10)])
def test_a_budget_pays_for_whole_replicas(budget: int, replicas: int) -> None:
    assert affordable_replicas(PLAN, budget) == replicas


def test_a_cost_that_is_rounded_down_to_the_budget_is_within_it() -> None:
    """The status shows $100 a month for 100.01, so $100 pay for it."""
    plan = {"replicas": 1, "cost": {"hourlyMilliUSD": 137}}
    assert affordable_replicas(plan, 100) == 1


def test_an_enforced_budget_names_the_replicas_that_it_pays_for() -> None:
    message = over_budget(PLAN, spec(4000))
    assert message is not None
    assert "$5,840" in message
    assert "set maxReplicas to 5 or less" in message
    assert over_budget(PLAN, spec(4000, autoscaling={"maxReplicas": 5})) is None, "what it says helps"


@pytest.mark.parametrize(
    "fine", [spec(8000), spec(1, "Observe"), spec(), deployment(accelerator={}, budget={"maxMonthlyUSD": 1}).spec]
)
def test_no_refusal_without_a_reason(fine: LLMDeploymentSpec) -> None:
    assert over_budget(PLAN, fine) is None


def test_more_replicas_make_no_new_plan() -> None:
    hashes = {input_hash(deployment(autoscaling={"maxReplicas": most})) for most in (1, 8)}
    assert hashes == {input_hash(deployment())} == {input_hash(deployment(replicas=9))}


def test_a_plan_without_a_price_is_shown_as_it_is() -> None:
    owner = deployment(autoscaling={"maxReplicas": 8})
    made = plan_from_spec(owner, PlanDefaults("registry/runtime:1"))
    assert planned_with_scaling_cost(made, owner.spec) is made


def test_the_replicas_of_the_spec_count_against_the_budget_with_a_load_too() -> None:
    """A load that needs one replica used to hide the cost of the other nine."""
    few = "workload: {requestsPerMinute: 1}\nbudget: {maxMonthlyUSD: 2000}\n"
    assert decide_on_l4(f"{few}replicas: 2").feasible
    found = decide_on_l4(f"{few}replicas: 10")
    assert isinstance(found, Infeasible)
    assert found.constraint == "budget"


def test_a_plan_says_what_the_load_needs_and_costs_what_the_spec_wants() -> None:
    pinned = decide_on_l4("workload: {requestsPerMinute: 300}")
    shown = planned_with_scaling_cost(pinned, deployment(accelerator={}, workload={"requestsPerMinute": 300}).spec)
    plan = shown.status_plan()
    needed = pinned.replicas
    assert needed > 1
    assert (plan["replicas"], plan["replicasForLoad"]) == (1, needed)
    assert plan["cost"]["hourlyMilliUSD"] == pinned.cost.hourly_milli_usd // needed
    (why,) = [reason["reason"] for reason in plan["reasons"] if reason["field"] == "replicas"]
    assert f"is predicted to need {needed}, each 80 % busy (${pinned.cost.monthly_usd:,} a month)" in why
    assert why.endswith("spec.replicas is 1.")
    assert "replicasForLoad" not in pinned.status_plan(), "it is shown, not pinned"


def test_without_a_load_no_replicas_are_said_to_be_needed() -> None:
    plan = {"replicas": 20, "predicted": {"requestsPerMinute": 50}, "reasons": []}
    assert replicas_for_load(plan, spec(workload={"requestsPerMinute": 900})) == 20
    assert replicas_for_load(plan, spec()) is None


def test_a_load_on_a_cpu_is_accepted_and_not_predicted() -> None:
    owner = deployment(workload={"requestsPerMinute": 900, "inputTokens": 100})
    plan = plan_from_spec(owner, DEFAULTS)
    assert plan.requires == ()
    (why,) = [reason.reason for reason in plan.reasons if reason.field == "workload"]
    assert "not predicted on a CPU" in why
    with_objective = plan_from_spec(deployment(objectives={"ttft": {"p95": "1s"}}), DEFAULTS)
    assert with_objective.requires == ("cpuPrediction",)


def decide_on_l4(text: str) -> Any:
    case = Case(LLAMA_8B, ("L4:4",) * 8, f"engine: {{maxModelLen: 4096}}\n{text}", choosable=CASES["no-budget"].runtime)
    return decide(case.deployment(), DEFAULTS, case.facts())
