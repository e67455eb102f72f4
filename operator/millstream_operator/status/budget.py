"""The condition `BudgetExceeded`: what is wanted costs more than the budget, and what the operator does about it. Pure.

An enforced budget stops growth and no pod: replicas beyond what it pays for are not added (`reconciling/budget.py`),
and those that run are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.conditions import BUDGET_EXCEEDED, Condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.scaling_cost import (
    affordable_replicas,
    bounded_maximum,
    enforced_limit,
    over_budget,
    replica_hourly_milli_usd,
)
from millstream_operator.planning.sizing.cost import monthly_usd
from millstream_operator.status.observation import Observation


def budget_exceeded(observation: Observation) -> Condition | None:
    """Return the condition for the running plan; None within the budget."""
    return budget_condition(observation.owner, observation.revision.plan, observation.asked_replicas)


def budget_condition(owner: LLMDeployment, plan: Mapping[str, Any], asked: int | None = None) -> Condition | None:
    """Return the condition for a `status.plan`. `asked`: spec.replicas where the budget allows fewer to run."""
    budget, each = owner.spec.budget, replica_hourly_milli_usd(plan)
    running = owner.spec.replicas
    wanted = running if asked is None else asked
    if budget is None or each is None:
        return None
    usd, limit = monthly_usd(each, wanted), affordable_replicas(plan, budget.max_monthly_usd) or 0
    if usd <= budget.max_monthly_usd:
        scaling = over_budget(plan, owner.spec)
        return _exceeded(f"{scaling} {_until_then(plan, owner)}") if scaling is not None else None
    place = f" -n {owner.metadata.namespace}" if owner.metadata.namespace else ""
    noun = "1 replica costs" if wanted == 1 else f"{wanted} replicas cost"
    cost = f"{noun} ${usd:,} a month, and budget.maxMonthlyUSD ${budget.max_monthly_usd:,} pays for {limit or 'none'}"
    if enforced_limit(plan, owner.spec) is None:
        return _exceeded(f"{cost}. budget.enforcement is Observe, so this is only reported.")
    held = f"{running} run, and no more are added" if wanted > running else "none is stopped, and no more are added"
    if running == 0:
        held = "none runs, and none is added"
    if limit == 0:
        return _exceeded(f"{cost}: {held}. Raise budget.maxMonthlyUSD to {usd} or more.")
    do = f"kubectl scale llmd {owner.name}{place} --replicas={limit}"
    return _exceeded(f"{cost}: {held}. Scale down ({do}), or raise the budget.")


def _until_then(plan: Mapping[str, Any], owner: LLMDeployment) -> str:
    bound = bounded_maximum(plan, owner.spec)
    if bound is None:
        return "The autoscaler is not changed until then."
    return f"Until then the autoscaler's maximum is {bound}."


def _exceeded(message: str) -> Condition:
    return Condition(BUDGET_EXCEEDED, True, Reason.BUDGET_EXCEEDED, message)
