"""Stages "compare" and "calibrate": what a pod measured beside what is predicted for it, and kept for later plans."""

from __future__ import annotations

from dataclasses import replace

from millstream_operator.facts.calibration_store import CalibrationStore
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.reconciling.context import ReconcileContext


class CalibrateStage:
    """`store` None: nothing is kept."""

    def __init__(self, store: CalibrationStore | None) -> None:
        self._store = store

    def compare(self, context: ReconcileContext) -> ReconcileContext:
        """Set `compared`, where a pod of the revision of today's spec was asked and its model is known."""
        revision, model = context.running, context.inspected.model if context.inspected is not None else None
        measured = context.answer.measured if context.answer is not None else None
        if self._store is None or model is None or measured is None or revision is not context.plan.pin.revision:
            return context
        if revision.input_hash != input_hash(context.owner):
            return context
        return replace(context, compared=self._store.compare(revision, model.shape, measured))

    async def run(self, context: ReconcileContext) -> None:
        """Record what was compared."""
        model = context.inspected.model if context.inspected is not None else None
        measured = context.answer.measured if context.answer is not None else None
        if self._store is not None and model is not None and measured is not None and context.compared is not None:
            await self._store.record(context.uid, context.running, model.shape, measured, context.compared)

    def forget(self, uid: str) -> None:
        if self._store is not None:
            self._store.forget(uid)
