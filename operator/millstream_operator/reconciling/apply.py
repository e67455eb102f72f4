"""Stage "apply": write the children that differ from what the rollout wants, and the companions of the model.

The record comes first: a pod never runs a revision that is not written down, and no failure is forgotten. Where the API
server refuses an object, the others are applied as far as that is safe (`refused_objects.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.api.status import AppliedStrategy
from millstream_operator.children.children import Children
from millstream_operator.children.companions import CompanionApplier, CompanionInput
from millstream_operator.children.foreign_autoscalers import ForeignAutoscalers, replicas_were_edited
from millstream_operator.children.foreign_services import ForeignServices
from millstream_operator.children.volume_checks import VolumeChecks
from millstream_operator.diagnosis.conditions import AUTOSCALER_CONFLICT, Condition, find
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.reconciling.refused_objects import Refused, problem_of, to_apply
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.surroundings import Surroundings
from millstream_operator.rollout.pruning import also_running, digests_in_use
from millstream_operator.rollout.revisions import record_of

Manifest = dict[str, Any]


class ApplyStage:
    """Writes through `children`; `volume_checks` knows which volumes cannot be mounted."""

    def __init__(
        self,
        children: Children,
        volume_checks: VolumeChecks,
        companions: CompanionApplier,
        surroundings: Callable[[], Surroundings],
        autoscalers: ForeignAutoscalers,
        services: ForeignServices,
    ) -> None:
        self._children, self._volume_checks, self._companions = children, volume_checks, companions
        self._surroundings, self._autoscalers, self._services = surroundings, autoscalers, services

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `wanted`, and `problem` where not all of it could be applied."""
        wanted = self._wanted(context)
        surges = context.rollout.strategy is AppliedStrategy.AVAILABILITY
        problem = await self._volume_checks.problem(context.owner, surges=surges) or await self._apply(context, wanted)
        return replace(context, wanted=wanted, problem=problem, replicas_edited=_is_edited(context, wanted))

    async def repair(self, context: ReconcileContext) -> ReconcileContext:
        """Keep what runs as it is while the spec has no plan; the status then reports the missing plan alone."""
        wanted = self._wanted(context)
        await self._apply(context, wanted)
        return replace(context, wanted=wanted, replicas_edited=_is_edited(context, wanted))

    async def apply_companions(self, context: ReconcileContext) -> ReconcileContext:
        """Set `companions`: the autoscaler and the monitors of what runs, and who else scales or selects it."""
        previous = context.previous.get("conditions") or ()
        given = CompanionInput(context.owner, context.key, context.running.plan, previous)
        found = await self._companions.apply_all(given)
        of_others = (
            await self._conflict(context, previous),
            await self._services.selecting(context.owner, context.running.template),
        )
        conditions = (*found.conditions, *(one for one in of_others if one is not None))
        return replace(context, companions=replace(found, conditions=conditions))

    async def _conflict(self, context: ReconcileContext, previous: Sequence[Manifest]) -> Condition | None:
        if context.workload is None or not (context.replicas_edited or find(previous, AUTOSCALER_CONFLICT)):
            return None
        return await self._autoscalers.conflict(context.owner, context.workload)

    async def _apply(self, context: ReconcileContext, wanted: Sequence[Manifest]) -> Diagnosis | None:
        """Apply in order, as far as possible. Return why not all could be applied."""
        refused: list[Refused] = []
        for one in wanted:
            allowed = to_apply(context, one, refused)
            if allowed is None:
                continue
            if (found := await self._children.apply_all(context.owner, [allowed])) is None:
                continue
            refused.append((one, found))
            kept = to_apply(context, one, refused) if allowed is one else None
            if kept is not None and kept is not one:  # the workload without its new template
                found = await self._children.apply_all(context.owner, [kept])
                refused += [(one, found)] if found is not None else []
        return problem_of(context, refused)

    def _wanted(self, context: ReconcileContext) -> list[Manifest]:
        """The record, then the objects of the revision that runs."""
        owner, rollout, running = context.owner, context.rollout, context.running
        others = also_running(context.records, digests_in_use(context.state, context.pods), running)
        held = rollout.shift.held if rollout.shift is not None else None
        render, around = functools.partial(context.workloads.render, held=held), self._surroundings()
        return [record_of(owner, rollout.pin), *objects(owner, running, rollout.strategy, others, around, render)]


def _is_edited(context: ReconcileContext, wanted: Sequence[Manifest]) -> bool:
    """Whether somebody else edited the replicas since the last turn. `context`: as it was before this turn applied."""
    kind = context.workloads.kind.kind
    return any(one["kind"] == kind and replicas_were_edited(context.workload, one) for one in wanted)
