"""The highest cost of autoscaling, from the plan's cost and the replicas it was made for. Pure.

Not a part of the plan: the plan is pinned, and another autoscaling.maxReplicas neither needs a new plan nor restarts a
pod. So it is added to the plan's reasons each time they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.api.workload import BudgetEnforcement
from millstream_operator.planning.plan import Infeasible, Plan, PlanReason

FIELD = "autoscaling.maxReplicas"


def max_cost_reason(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> PlanReason | None:
    """The reason that names the highest cost; None without autoscaling, or where no cost is known.

    `status_plan` is the plan in the form of status.plan, whose cost is that of all its replicas.
    """
    monthly = _monthly_usd(status_plan, spec)
    if monthly is None or spec.autoscaling is None:
        return None
    budget = spec.budget
    verdict = ""
    if budget is not None:
        verdict = f", {'over' if monthly > budget.max_monthly_usd else 'within'} ${budget.max_monthly_usd:,}"
    return PlanReason(FIELD, f"Up to {spec.autoscaling.max_replicas} replicas: ${monthly:,} a month at most{verdict}.")


def over_budget(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> str | None:
    """One sentence where autoscaling could exceed an enforced budget, with the number of replicas that could not."""
    monthly = _monthly_usd(status_plan, spec)
    budget, scaling = spec.budget, spec.autoscaling
    if monthly is None or budget is None or scaling is None or monthly <= budget.max_monthly_usd:
        return None
    if budget.enforcement is BudgetEnforcement.OBSERVE:
        return None
    affordable = budget.max_monthly_usd * scaling.max_replicas // monthly
    return (
        f"autoscaling.maxReplicas {scaling.max_replicas} may cost ${monthly:,} a month, and budget.maxMonthlyUSD is "
        f"${budget.max_monthly_usd:,}: set maxReplicas to {affordable} or less, or raise the budget."
    )


def with_scaling_cost(status_plan: dict[str, Any], spec: LLMDeploymentSpec) -> dict[str, Any]:
    """status.plan with that reason among its own."""
    reason = max_cost_reason(status_plan, spec)
    if reason is None:
        return status_plan
    return status_plan | {"reasons": [*status_plan["reasons"], reason.as_dict()]}


def planned_with_scaling_cost(planned: Plan | Infeasible, spec: LLMDeploymentSpec) -> Plan | Infeasible:
    """The same for a plan that was just made, as `millstream plan` shows it."""
    reason = max_cost_reason(planned.status_plan(), spec) if isinstance(planned, Plan) else None
    if not isinstance(planned, Plan) or reason is None:
        return planned
    return replace(planned, reasons=(*planned.reasons, reason))


def _monthly_usd(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> int | None:
    """Dollars a month with autoscaling.maxReplicas replicas."""
    cost, replicas = status_plan.get("cost"), status_plan.get("replicas")
    if spec.autoscaling is None or not cost or not replicas:
        return None
    monthly: int = cost["monthlyUSD"]
    dollars: int = round(monthly * spec.autoscaling.max_replicas / replicas)
    return dollars
