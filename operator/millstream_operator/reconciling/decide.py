"""Stage "decide": which revision runs, and how it reaches the pods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.inventory.room import Room
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.rollout import RolloutInput, next_step
from millstream_operator.workloads.replica import Replica

Manifest = dict[str, Any]
RoomFor = Callable[
    [LLMDeployment, Revision, Sequence[Replica], Sequence[Manifest], int], Room
]  # as `ClusterFacts.room`


def decide(
    context: ReconcileContext,
    room: RoomFor,
    now: str | None = None,
    *,
    announces: bool = True,
    advancing: Collection[str] = (),
) -> ReconcileContext:
    """Set `step`. Pure, apart from looking for room.

    `announces`: the caller writes the step's decisions to the status before it applies the step. Otherwise the step has
    none, and its record is not marked as if the journal had them. `advancing`: uids of pods whose bytes move.
    """
    pin = context.plan.pin
    inputs = RolloutInput(
        context.owner,
        pin,
        context.records,
        context.workload,
        context.pods,
        context.previous.get("decisions") or (),
        functools.partial(room, context.owner),
        announces,
        now,
        advancing,
        context.workloads,
        context.comparison,
    )
    return replace(context, step=next_step(inputs))
