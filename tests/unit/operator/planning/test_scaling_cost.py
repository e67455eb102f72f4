"""What all the replicas of autoscaling may cost: added to the plan, never pinned with it, and held to the budget."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.scaling_cost import (
    max_cost_reason,
    over_budget,
    planned_with_scaling_cost,
    with_scaling_cost,
)
from millstream_operator.planning.spec_plan import plan_from_spec
from tests.support.llmdeployments import deployment

# Two replicas at $1,000 a month each.
PLAN: dict[str, Any] = {"replicas": 2, "cost": {"monthlyUSD": 2000}, "reasons": [{"field": "a", "reason": "b"}]}


def spec(budget: int | None = None, enforcement: str | None = None, **fields: Any) -> LLMDeploymentSpec:
    limit: dict[str, Any] = {"maxMonthlyUSD": budget} | ({"enforcement": enforcement} if enforcement else {})
    given = {"autoscaling": {"maxReplicas": 8}, "accelerator": {}} | ({"budget": limit} if budget else {}) | fields
    return deployment(**given).spec


def test_the_highest_cost_is_added_to_the_plans_reasons() -> None:
    plan = with_scaling_cost(PLAN, spec())
    assert plan["reasons"] == [
        {"field": "a", "reason": "b"},
        {"field": "autoscaling.maxReplicas", "reason": "Up to 8 replicas: $8,000 a month at most."},
    ]
    assert len(PLAN["reasons"]) == 1, "the pinned plan is as it was"


@pytest.mark.parametrize(("budget", "verdict"), [(8000, "within $8,000."), (7999, "over $7,999.")])
def test_it_is_compared_with_the_budget(budget: int, verdict: str) -> None:
    reason = max_cost_reason(PLAN, spec(budget))
    assert reason is not None
    assert reason.reason.endswith(verdict)


@pytest.mark.parametrize("unknown", [{}, {"replicas": 2}, {"cost": {"monthlyUSD": 5}}, {"replicas": 0, "cost": {}}])
def test_what_is_not_known_is_not_said(unknown: dict[str, Any]) -> None:
    status_plan = {"reasons": [], **unknown}
    assert with_scaling_cost(status_plan, spec(1)) == status_plan
    assert over_budget(status_plan, spec(1)) is None


def test_an_enforced_budget_names_the_replicas_that_it_pays_for() -> None:
    message = over_budget(PLAN, spec(5500))
    assert message is not None
    assert "$8,000" in message
    assert "set maxReplicas to 5 or less" in message
    assert over_budget(PLAN, spec(5000, autoscaling={"maxReplicas": 5})) is None, "what it says helps"


@pytest.mark.parametrize(
    "fine", [spec(8000), spec(1, "Observe"), spec(), deployment(accelerator={}, budget={"maxMonthlyUSD": 1}).spec]
)
def test_no_refusal_without_a_reason(fine: LLMDeploymentSpec) -> None:
    assert over_budget(PLAN, fine) is None


def test_more_replicas_make_no_new_plan() -> None:
    hashes = {input_hash(deployment(autoscaling={"maxReplicas": most})) for most in (1, 8)}
    assert hashes == {input_hash(deployment())}


def test_a_plan_without_a_price_is_shown_as_it_is() -> None:
    owner = deployment(autoscaling={"maxReplicas": 8})
    made = plan_from_spec(owner, PlanDefaults("registry/runtime:1"))
    assert planned_with_scaling_cost(made, owner.spec) is made
