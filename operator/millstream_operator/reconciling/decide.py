"""Stage "decide": which revision runs, and how it reaches the pods."""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rollout.rollout import RolloutInput, SpareGPUs, next_step


def decide(context: ReconcileContext, spare: SpareGPUs, *, announces: bool = True) -> ReconcileContext:
    """Set `step`. Pure, apart from the question whether GPUs are free.

    `announces`: the caller writes the step's decisions to the status before it applies the step. Otherwise the step has
    none, and its record is not marked as if the journal had them.
    """
    pin = context.plan.pin
    inputs = RolloutInput(
        context.owner,
        pin,
        context.records,
        context.workload,
        context.pods,
        context.previous.get("decisions") or (),
        spare(context.owner, pin.revision),
        announces,
    )
    return replace(context, step=next_step(inputs))
