"""What is applied although the API server refuses one of the objects. Pure.

    refused                                   the workload
    PodDisruptionBudget                       as wanted: no pod needs it
    any other object, another pod template    the template that runs stays; replicas and strategy follow the spec
    any other object, no workload yet         none is made
    the workload with another pod template    as above: its replicas follow the spec with the template that runs

A new pod template must not start without its NetworkPolicy, its record or its configuration. What serves already does
not depend on the refused object, so it is scaled, asked and reported as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.kube.kinds import POD_DISRUPTION_BUDGET
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rollout.revisions import revision_that_runs
from millstream_operator.rollout.traffic_shift.stages import Shift, scaled

Manifest = dict[str, Any]
Refused = tuple[Manifest, Diagnosis]  # an object, and why it is refused
OPTIONAL_KINDS = frozenset({POD_DISRUPTION_BUDGET.kind})


def to_apply(context: ReconcileContext, wanted: Manifest, refused: Sequence[Refused]) -> Manifest | None:
    """Return the object as it may be applied after these were refused; None where it must wait for them."""
    if wanted["kind"] != context.workloads.kind.kind or not is_held(context, refused):
        return wanted
    kept = revision_that_runs(context.records, context.live_digest)
    if context.workload is None or kept is None:
        return None
    strategy, state = context.rollout.strategy, context.state
    held = None
    if state is not None and state.held is not None and strategy is AppliedStrategy.AVAILABILITY:
        held = scaled(Shift(state.held, max(1, state.wanted or 1)), context.owner.spec.replicas).held
    return context.workloads.render(context.owner, kept.revision.template, strategy, held)


def is_held(context: ReconcileContext, refused: Sequence[Refused]) -> bool:
    """Whether the wanted pod template must wait. Going back to the last good revision does not."""
    if all(one["kind"] in OPTIONAL_KINDS for one, _ in refused):
        return False
    rollout = context.rollout
    if context.workload is None:
        return True
    return context.live_digest != rollout.running.revision.digest and rollout.running is rollout.pin


def problem_of(context: ReconcileContext, refused: Sequence[Refused]) -> Diagnosis | None:
    """Return one diagnosis for all that is refused: what holds the pods first, with what goes on meanwhile."""
    if not refused:
        return None
    ordered = sorted(refused, key=lambda one: one[0]["kind"] in OPTIONAL_KINDS)
    first, named = ordered[0][1], dict.fromkeys(f"{one['kind']} {one['metadata']['name']}" for one, _ in ordered)
    others = [*named][1:]
    also = f" Refused, too: {', '.join(others)}." if others else ""
    return replace(first, detail=f"{first.detail}{also}", hint=f"{first.hint} {_meanwhile(context, refused)}".strip())


def _meanwhile(context: ReconcileContext, refused: Sequence[Refused]) -> str:
    if context.workload is None:
        return "No pod is made before." if is_held(context, refused) else ""
    workloads = sum(one["kind"] == context.workloads.kind.kind for one, _ in refused)
    if workloads > (1 if is_held(context, refused) else 0):  # refused with the template that runs, too
        return "The pods that run stay as they are."
    if is_held(context, refused):
        return f"The pods that run stay and follow spec.replicas; revision {context.running.name} waits for it."
    return "The pods do not wait for it."
