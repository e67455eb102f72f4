"""Stage "calibrate": record the measured memory of a revision that serves, for later plans."""

from __future__ import annotations

from millstream_operator.facts.calibration_store import CalibrationStore
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.reconciling.context import ReconcileContext


class CalibrateStage:
    """`store` None: nothing is kept."""

    def __init__(self, store: CalibrationStore | None) -> None:
        self._store = store

    async def run(self, context: ReconcileContext) -> None:
        """Record what the status holds, once the revision of today's spec answered. Only that has a known model."""
        revision, model = context.running, context.inspected.model if context.inspected is not None else None
        if self._store is None or model is None or context.answer is None or context.answer.failure is not None:
            return
        if revision is not context.plan.pin.revision or revision.input_hash != input_hash(context.owner):
            return
        measured = (context.previous.get("memory") or {}).get("measured")
        if measured and (context.previous.get("rollout") or {}).get("updateRevision") == revision.name:
            await self._store.record(context.uid, revision, model.shape, measured)

    def forget(self, uid: str) -> None:
        if self._store is not None:
            self._store.forget(uid)
