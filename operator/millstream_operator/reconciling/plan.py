"""Stage "plan": the pinned plan, or a new one. Only a new plan needs its model inspected, made and judged."""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.facts.inspector import Inspector
from millstream_operator.kube.index import OwnerKey
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.spec_plan import weights_path
from millstream_operator.preparation.preparer import Prepared, Preparer
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rollout.pinning import Pinning
from millstream_operator.rollout.queue_changes import waits_for_another_queue
from millstream_operator.rollout.revisions import PinnedRevision, pinned


class PlanStage:
    """`pinning` keeps the plan, `inspector` knows the models, `preparer` makes and judges them."""

    def __init__(self, pinning: Pinning, inspector: Inspector, preparer: Preparer) -> None:
        self._pinning, self._inspector, self._preparer = pinning, inspector, preparer

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `chosen`.

        Raises:
            PlanRefused: there is no plan for the spec, or it cannot be run.
        """
        owner, key, records = context.owner, context.key, context.records
        kept = pinned(owner, records, context.unknown_fields)
        if kept is not None and waits_for_another_queue(owner, records, context.state):
            kept = None
        if kept is not None:
            inspected = self._inspector.known(owner, key)
        else:
            inspected = await self._inspector.ask(owner, key)
        prepared = await self._prepared(owner, key, kept, inspected)
        journal = context.previous.get("decisions") or ()
        chosen = self._pinning.choose(owner, records, kept, inspected, context.restored, journal)
        return replace(context, inspected=inspected, prepared=prepared, chosen=chosen)

    async def _prepared(
        self, owner: LLMDeployment, key: OwnerKey, kept: PinnedRevision | None, inspected: Inspected
    ) -> Prepared:
        """A plan that is kept was prepared before it was pinned. No Job runs for a plan that would be refused."""
        quantization = owner.spec.quantization
        if quantization is None or (quantization.calibration is None and quantization.quality_gate is None):
            await self._preparer.stop(owner, key)
            return Prepared()
        if kept is not None:
            revision = kept.revision.resolved_revision
            return self._preparer.known(owner, key, weights_path(owner, revision), revision)
        return await self._preparer.ask(owner, key, self._pinning.preview(owner, inspected), inspected.model)
