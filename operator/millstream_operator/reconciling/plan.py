"""Stage "plan": the pinned plan, or a new one. Only a new plan needs an inspection of its model."""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.facts.inspector import Inspector
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rollout.pinning import Pinning
from millstream_operator.rollout.queue_changes import waits_for_another_queue
from millstream_operator.rollout.revisions import pinned


class PlanStage:
    """`pinning` keeps the plan, `inspector` knows the models."""

    def __init__(self, pinning: Pinning, inspector: Inspector) -> None:
        self._pinning, self._inspector = pinning, inspector

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
        journal = context.previous.get("decisions") or ()
        chosen = self._pinning.choose(owner, records, kept, inspected, context.restored, journal)
        return replace(context, inspected=inspected, chosen=chosen)
