"""Hold the replicas to what an enforced budget pays for. Pure.

    replicas that run = min(spec.replicas, max(replicas that the budget pays for, replicas that run already))

`kubectl scale` makes no new plan, so no plan can be refused: the Deployment does not grow beyond the budget instead.
It does not shrink either: a budget or a price that changes stops no pod. What spec.replicas asked for is kept for the
condition `BudgetExceeded`.

Somebody may scale the Deployment itself. So replicas that run already are those that the operator wrote last
(`BUDGETED_ANNOTATION`), as far as they are still there; the others are taken back. The number follows from the cluster
alone, so a restarted operator finds the same.
"""

from __future__ import annotations

import re
from dataclasses import replace

from millstream_operator.planning.scaling_cost import enforced_limit
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rendering.deployment import BUDGETED_ANNOTATION

_COUNT = re.compile("[0-9]{1,9}")  # somebody may have edited it


def hold_to_budget(context: ReconcileContext) -> ReconcileContext:
    """Lower the owner's replicas, for all later stages, to what may run. The plan stage has run."""
    spec = context.owner.spec
    limit = enforced_limit(context.plan.pin.revision.plan, spec)
    if limit is None or context.asked_replicas is not None:
        return context
    allowed = max(limit, _running(context))
    if spec.replicas <= allowed:
        return context
    held = context.owner.model_copy(update={"spec": spec.model_copy(update={"replicas": allowed})})
    return replace(context, owner=held, asked_replicas=spec.replicas)


def _running(context: ReconcileContext) -> int:
    """The replicas that run already. An object of an older operator has no record of them: it is believed once."""
    if context.workload is None or context.state is None:
        return 0
    live = context.state.wanted or 0
    recorded = (context.workload["metadata"].get("annotations") or {}).get(BUDGETED_ANNOTATION, "")
    return min(live, int(recorded)) if _COUNT.fullmatch(recorded) else live
