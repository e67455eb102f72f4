"""Hold the replicas to what an enforced budget pays for. Pure.

    replicas that run = min(spec.replicas, max(replicas that the budget pays for, replicas of the Deployment))

`kubectl scale` makes no new plan, so no plan can be refused: the Deployment does not grow beyond the budget instead.
It does not shrink either: a budget or a price that changes stops no pod. What spec.replicas asked for is kept for the
condition `BudgetExceeded`. The number follows from the cluster alone, so a restarted operator finds the same.
"""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.planning.scaling_cost import enforced_limit
from millstream_operator.reconciling.context import ReconcileContext


def hold_to_budget(context: ReconcileContext) -> ReconcileContext:
    """Lower the owner's replicas, for all later stages, to what may run. The plan stage has run."""
    spec = context.owner.spec
    limit = enforced_limit(context.plan.pin.revision.plan, spec)
    if limit is None or context.asked_replicas is not None:
        return context
    running = (context.workload or {}).get("spec", {}).get("replicas") or 0
    allowed = max(limit, running)
    if spec.replicas <= allowed:
        return context
    held = context.owner.model_copy(update={"spec": spec.model_copy(update={"replicas": allowed})})
    return replace(context, owner=held, asked_replicas=spec.replicas)
