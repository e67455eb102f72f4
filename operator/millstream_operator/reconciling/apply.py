"""Stage "apply": write the children that differ from what the rollout wants, and the companions of the model.

The record comes first: a pod never runs a revision that is not written down, and no failure is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.children.children import Children
from millstream_operator.children.companions import CompanionApplier, CompanionInput
from millstream_operator.children.volume_checks import VolumeChecks
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.reconciling.context import ReconcileContext
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
    ) -> None:
        self._children, self._volume_checks, self._companions = children, volume_checks, companions
        self._surroundings = surroundings

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `wanted`, and `problem` where not all of it could be applied."""
        wanted = self._wanted(context)
        problem = await self._volume_checks.problem(context.owner, wanted) or await self._apply(context, wanted)
        return replace(context, wanted=wanted, problem=problem)

    async def repair(self, context: ReconcileContext) -> ReconcileContext:
        """Keep what runs as it is while the spec has no plan; the status then reports the missing plan alone."""
        wanted = self._wanted(context)
        await self._apply(context, wanted)
        return replace(context, wanted=wanted)

    async def apply_companions(self, context: ReconcileContext) -> ReconcileContext:
        """Set `companions`: the autoscaler and the monitors of what runs."""
        previous = context.previous.get("conditions") or ()
        given = CompanionInput(context.owner, context.key, context.running.plan, previous)
        return replace(context, companions=await self._companions.apply_all(given))

    async def _apply(self, context: ReconcileContext, wanted: Sequence[Manifest]) -> Diagnosis | None:
        return await self._children.apply_all(context.owner, wanted)

    def _wanted(self, context: ReconcileContext) -> list[Manifest]:
        """The record, then the objects of the revision that runs."""
        owner, rollout, running = context.owner, context.rollout, context.running
        others = also_running(context.records, digests_in_use(context.workload, context.pods), running)
        return [record_of(owner, rollout.pin), *objects(owner, running, rollout.strategy, others, self._surroundings())]
