"""What replicas cost: those that are wanted now, those that the load needs, and all that autoscaling may want. Pure.

Not a part of the plan: the plan is pinned, and `kubectl scale` or another autoscaling.maxReplicas neither needs a new
plan nor restarts a pod. So replicas, cost and what a budget says of them are computed each time a plan is shown, from
the price of one replica in the pinned plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.api.workload import BudgetEnforcement, Workload
from millstream_operator.planning.plan import Infeasible, Plan, PlanReason
from millstream_operator.planning.sizing.cost import HOURS_PER_MONTH, monthly_usd

REPLICAS, BUDGET, MAX_REPLICAS = "replicas", "budget", "autoscaling.maxReplicas"
LIVE_REASONS = (REPLICAS, BUDGET, MAX_REPLICAS)  # pinned ones of these fields are replaced


def with_scaling_cost(status_plan: dict[str, Any], spec: LLMDeploymentSpec) -> dict[str, Any]:
    """status.plan with the replicas that are wanted now, their cost, and the reasons that follow from both."""
    found = dict(status_plan)
    if "replicas" in found:
        found["replicas"] = spec.replicas
    if (for_load := replicas_for_load(status_plan, spec)) is not None:
        found["replicasForLoad"] = for_load
    if (each := replica_hourly_milli_usd(status_plan)) is not None:
        usd = monthly_usd(each, spec.replicas)
        found["cost"] = {**found["cost"], "hourlyMilliUSD": round(each * spec.replicas), "monthlyUSD": usd}
    pinned = [reason for reason in status_plan["reasons"] if reason["field"] not in LIVE_REASONS]
    found["reasons"] = [*pinned, *(reason.as_dict() for reason in live_reasons(status_plan, spec))]
    return found


def planned_with_scaling_cost(planned: Plan | Infeasible, spec: LLMDeploymentSpec) -> Plan | Infeasible:
    """The same for a plan that was just made, as `millstream plan` shows it."""
    if isinstance(planned, Infeasible) or planned.cost is None or not planned.replicas:
        return planned
    shown = with_scaling_cost(planned.status_plan(), spec)
    cost = replace(
        planned.cost, hourly_milli_usd=shown["cost"]["hourlyMilliUSD"], monthly_usd=shown["cost"]["monthlyUSD"]
    )
    return replace(
        planned,
        replicas=shown["replicas"],
        replicas_for_load=shown.get("replicasForLoad"),
        cost=cost,
        reasons=tuple(PlanReason(**reason) for reason in shown["reasons"]),
    )


def live_reasons(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> list[PlanReason]:
    """The reasons about the load, the budget and autoscaling, where they are given and a price is known."""
    found, each = [], replica_hourly_milli_usd(status_plan)
    if (for_load := replicas_for_load(status_plan, spec)) is not None:
        cost = f" (${monthly_usd(each, for_load):,} a month)" if each is not None else ""
        why = f"The load is predicted to need {for_load}, each 80 % busy{cost}; spec.replicas is {spec.replicas}."
        found.append(PlanReason(REPLICAS, why))
    if each is not None and spec.budget is not None:
        usd = monthly_usd(each, spec.replicas)
        found.append(PlanReason(BUDGET, f"${usd:,} a month, {_verdict(usd, spec.budget.max_monthly_usd)}."))
    if each is not None and spec.autoscaling is not None:
        usd, verdict = monthly_usd(each, spec.autoscaling.max_replicas), ""
        if spec.budget is not None:
            verdict = f", {_verdict(usd, spec.budget.max_monthly_usd)}"
        why = f"Up to {spec.autoscaling.max_replicas} replicas: ${usd:,} a month at most{verdict}."
        found.append(PlanReason(MAX_REPLICAS, why))
    return found


def over_budget(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> str | None:
    """One sentence where autoscaling could exceed an enforced budget, with the number of replicas that could not."""
    limit, scaling, budget = enforced_limit(status_plan, spec), spec.autoscaling, spec.budget
    each = replica_hourly_milli_usd(status_plan)
    if limit is None or scaling is None or budget is None or each is None or scaling.max_replicas <= limit:
        return None
    usd = monthly_usd(each, scaling.max_replicas)
    fields = "maxReplicas" if (scaling.min_replicas or 1) <= limit else "minReplicas and maxReplicas"
    most = monthly_usd(each, scaling.max_replicas)
    remedy = f"set {fields} to {limit} or less, or raise the budget to {most}" if limit else f"raise it to {most}"
    return (
        f"autoscaling.maxReplicas {scaling.max_replicas} may cost ${usd:,} a month, and budget.maxMonthlyUSD is "
        f"${budget.max_monthly_usd:,}: {remedy}."
    )


def bounded_maximum(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> int | None:
    """The most replicas that an autoscaler may ask for within an enforced budget; None where none are within it.

    Replicas that run already are not scaled down for the budget. `spec.replicas` is what may run.
    """
    limit, scaling = enforced_limit(status_plan, spec), spec.autoscaling
    if scaling is None:
        return None
    if limit is None or scaling.max_replicas <= limit:
        return scaling.max_replicas
    bound = min(scaling.max_replicas, max(limit, spec.replicas))
    return bound if bound >= max(1, scaling.min_replicas or 1) else None


def enforced_limit(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> int | None:
    """The replicas that an enforced budget pays for; None where there is none, or no price is known."""
    budget = spec.budget
    if budget is None or budget.enforcement is BudgetEnforcement.OBSERVE:
        return None
    return affordable_replicas(status_plan, budget.max_monthly_usd)


def affordable_replicas(status_plan: Mapping[str, Any], max_monthly_usd: int) -> int | None:
    """The replicas that so much pays for; None where no price is known, or a replica costs nothing."""
    each = replica_hourly_milli_usd(status_plan)
    if not each:
        return None
    found = int(max_monthly_usd * 1000 / (each * HOURS_PER_MONTH))
    return found + 1 if monthly_usd(each, found + 1) <= max_monthly_usd else found  # a cost is rounded


def replicas_for_load(status_plan: Mapping[str, Any], spec: LLMDeploymentSpec) -> int | None:
    """The replicas that the load is predicted to need; None without a load or a prediction."""
    workload = spec.workload or Workload()
    if workload.requests_per_minute is None and workload.concurrency is None:
        return None
    # A pinned plan has that number as its replicas, and its cost is theirs.
    needed: int | None = status_plan.get("replicas") if status_plan.get("predicted") else None
    return needed


def replica_hourly_milli_usd(status_plan: Mapping[str, Any]) -> float | None:
    """The price of one replica in the plan; None where none is known."""
    cost, replicas = status_plan.get("cost"), status_plan.get("replicas")
    if not cost or not replicas:
        return None
    return float(cost["hourlyMilliUSD"] / replicas)


def _verdict(usd: int, max_monthly_usd: int) -> str:
    return f"{'over' if usd > max_monthly_usd else 'within'} ${max_monthly_usd:,}"
