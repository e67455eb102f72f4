"""Stage "compare": while traffic shifts to a new revision in stages, read its pods and the old ones.

What the pods answered is counted from the beginning of the shift, and kept on the record of the revision: a verdict is
written together with the evidence that it follows from, so a look that was not written has decided nothing. Remembered
here is only when the pods were read last, by a monotonic clock: the time in which no operator runs does not count as
waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.diagnosis.pod_facts import runtime_status
from millstream_operator.probing.pod_traffic import MAX_READ, TrafficReader
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rollout.revisions import PinnedRevision, last_answered
from millstream_operator.rollout.traffic_shift.evidence import (
    Evidence,
    PodCounters,
    Reading,
    look,
    stage_begins,
    waited,
)
from millstream_operator.rollout.traffic_shift.evidence_record import read_evidence
from millstream_operator.rollout.traffic_shift.staged_shift import (
    READ_SECONDS,
    compared,
    evidence_timeout_seconds,
    limits_of,
    under_way,
)
from millstream_operator.rollout.traffic_shift.stages import Shift
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.traffic import Traffic

Manifest = dict[str, Any]
# A shift without requests writes how long it has waited no more often than this.
LEAST_WRITTEN_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class _Looks:
    """When the pods of one shift were read. `counted`: up to when the record counts the waiting of its stage."""

    subject: object
    due: float = 0.0
    counted: float | None = None


class CompareStage:
    """For use within one event loop. `clock` is monotonic seconds."""

    def __init__(self, reader: TrafficReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = reader, clock
        self._looks: dict[str, _Looks] = {}  # by the owner's uid

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `comparison`, where a staged shift is under way and its first new pod is ready."""
        pin = context.plan.pin
        old = last_answered(context.records, but=pin)
        shift = under_way(context.owner, pin, old, context.state)
        if shift is None or old is None or context.workload is None:
            self.forget(context.uid)
            return context
        new_ones, old_ones = (_living(context.replicas, one.revision.digest) for one in (pin, old))
        kept = read_evidence(pin.marks.evidence)
        if kept is None and not any(one.is_ready for one in new_ones):
            return context
        evidence = kept or Evidence()
        settled = shift.is_settled and len(new_ones) >= shift.held and all(one.is_ready for one in new_ones)
        looks = self._looks_at(context.uid, pin)
        if self._clock() >= looks.due:
            looks.due = self._clock() + READ_SECONDS
            new_read = await self._read(context.workload, pin, new_ones)
            old_read = await self._read(context.workload, old, old_ones)
            evidence = self._looked(context, looks, evidence, (new_read, old_read), shift if settled else None)
        limits = limits_of(context.owner, pin.revision, old.revision)
        return replace(context, comparison=compared(context.owner, shift, evidence, limits, settled=settled))

    def _looked(
        self,
        context: ReconcileContext,
        looks: _Looks,
        before: Evidence,
        read: tuple[Reading, Reading],
        shift: Shift | None,
    ) -> Evidence:
        """Return the evidence after a look. `shift`: None while not all pods of its stage are ready."""
        after = look(before, *read)
        if shift is None:
            looks.counted = None
            return after
        after, now = stage_begins(after, shift.percent), self._clock()
        if after.stage is None or looks.counted is None or before.stage is None:
            looks.counted = now
            return after
        seconds, limit_seconds = now - looks.counted, evidence_timeout_seconds(context.owner)
        is_over = after.stage.waited_seconds + seconds >= limit_seconds > after.stage.waited_seconds
        if after == before and seconds < LEAST_WRITTEN_WAIT_SECONDS and not is_over:
            return before
        looks.counted = now
        return waited(after, seconds)

    async def _read(self, workload: Manifest, pin: PinnedRevision, replicas: Sequence[Replica]) -> Reading:
        """Return what the pods of one revision said: the first pod of each replica that serves."""
        ready = sorted((one for one in replicas if one.is_ready), key=lambda one: one.name)[:MAX_READ]
        read = await self._reader.read(workload, [one.pods[0] for one in ready], pin.revision)
        return Reading(
            frozenset(one.uid for one in replicas),
            {one.uid: _counters(one, read) for one in ready},
        )

    def _looks_at(self, uid: str, pin: PinnedRevision) -> _Looks:
        subject = (pin.revision.name, pin.number)
        if (known := self._looks.get(uid)) is None or known.subject != subject:
            known = self._looks[uid] = _Looks(subject)
        return known

    def forget(self, uid: str) -> None:
        self._looks.pop(uid, None)


def _living(replicas: Sequence[Replica], digest: str) -> list[Replica]:
    return [one for one in replicas if one.digest == digest and not one.is_terminating]


def _counters(replica: Replica, read: Mapping[str, Traffic]) -> PodCounters:
    restarts = sum(int(runtime_status(pod).get("restartCount", 0)) for pod in replica.pods)
    return PodCounters(read.get(replica.uid), restarts)
