"""Stage "plan": the pinned plan, or a new one. Only a new plan needs its model inspected, made and judged."""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.facts.inspector import Inspector
from millstream_operator.kube.index import OwnerKey
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.requires import tuning_of
from millstream_operator.planning.spec_plan import weights_path
from millstream_operator.preparation.draft_tuner import NOT_TUNED, DraftState, DraftTuner
from millstream_operator.preparation.preparer import Prepared, Preparer
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rendering.tuning_job import DraftPair
from millstream_operator.rollout.pinning import Pinning
from millstream_operator.rollout.queue_changes import waits_for_another_queue
from millstream_operator.rollout.revisions import PinnedRevision, pinned


class PlanStage:
    """`pinning` keeps the plan, `inspector` knows the models, `preparer` makes and judges them, `tuner` their draft."""

    def __init__(self, pinning: Pinning, inspector: Inspector, preparer: Preparer, tuner: DraftTuner) -> None:
        self._pinning, self._inspector, self._preparer, self._tuner = pinning, inspector, preparer, tuner

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `chosen`.

        Raises:
            PlanRefused: there is no plan for the spec, or it cannot be run.
        """
        owner, key, records = context.owner, context.key, context.records
        kept = pinned(owner, records, context.unknown_fields)
        if kept is not None and waits_for_another_queue(owner, records, context.state):
            kept = None
        inspected = await self._inspected(context, kept)
        draft = await self._draft(context, kept, inspected)
        if kept is not None and not draft.allows(kept.revision.tuned_draft):
            kept = pinned(owner, records, context.unknown_fields, draft.drafts)
            inspected = await self._inspected(context, kept)
        loaded = draft.chosen if kept is None else kept.revision.tuned_draft
        inspected = replace(inspected, tuned_draft=loaded) if loaded is not None else inspected
        prepared = await self._prepared(owner, key, kept, inspected)
        journal = context.previous.get("decisions") or ()
        chosen = self._pinning.choose(owner, records, kept, inspected, context.restored, journal)
        return replace(context, inspected=inspected, prepared=prepared, draft=draft, chosen=chosen)

    async def _inspected(self, context: ReconcileContext, kept: PinnedRevision | None) -> Inspected:
        """Only a new plan waits for what is not known yet."""
        if kept is not None:
            return self._inspector.known(context.owner, context.key)
        return await self._inspector.ask(context.owner, context.key)

    async def _draft(self, context: ReconcileContext, kept: PinnedRevision | None, inspected: Inspected) -> DraftState:
        """Which draft the pods may load. The models are those of the pinned revision, or of the plan to be made."""
        owner, key = context.owner, context.key
        if tuning_of(owner.spec) is None:
            await self._tuner.stop(owner, key)
            return NOT_TUNED
        if kept is not None:
            revision = kept.revision
            target = weights_path(owner, revision.resolved_revision)
            pair = DraftPair(target, revision.resolved_revision, revision.resolved_draft_revision)
        else:
            plan = self._pinning.preview(owner, inspected)
            draft_revision = plan.draft.revision if plan.draft is not None else None
            pair = DraftPair(plan.model_path, plan.model_revision, draft_revision)
        answered = kept.revision if kept is not None and kept.marks.answered else None
        return await self._tuner.ask(owner, key, pair, answered, inspected, context.previous)

    async def _prepared(
        self, owner: LLMDeployment, key: OwnerKey, kept: PinnedRevision | None, inspected: Inspected
    ) -> Prepared:
        """A plan that is kept was prepared before it was pinned. No Job runs for a plan that would be refused.

        Where the volume was deleted, the model is made again in its place, and the plan stays.
        """
        quantization = owner.spec.quantization
        if quantization is None or (quantization.calibration is None and quantization.quality_gate is None):
            await self._preparer.stop(owner, key)
            return Prepared()
        if kept is None:
            return await self._preparer.ask(owner, key, self._pinning.preview(owner, inspected), inspected.model)
        revision = kept.revision.resolved_revision
        path = weights_path(owner, revision)
        if not self._preparer.is_made_again(owner, key, path, revision):
            return await self._preparer.known(owner, key, path, revision)
        inspected = await self._inspector.ask(owner, key)
        plan = replace(self._pinning.preview(owner, inspected), model_path=path, model_revision=revision)
        return await self._preparer.ask(owner, key, plan, inspected.model)
