"""Stage "compare": while traffic shifts to a new revision in stages, read its pods and the old ones.

A stage is compared from when all its new pods are ready, and may end after LEAST_SECONDS with ENOUGH_REQUESTS finished
in them, or after MOST_SECONDS: an idle model moves on by time, and so does one whose pods cannot be read. Counters at
the beginning of a stage are remembered here alone: another process of the operator compares the stage anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream_operator.diagnosis.pod_facts import runtime_status
from millstream_operator.probing.pod_traffic import TrafficReader
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rollout.revisions import last_answered
from millstream_operator.rollout.traffic_shift.staged_shift import (
    READ_SECONDS,
    Comparison,
    itl_objective_seconds,
    under_way,
)
from millstream_operator.rollout.traffic_shift.traffic_judgement import Side, in_words, why_worse
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.traffic import Traffic, total

Manifest = dict[str, Any]
LEAST_SECONDS, MOST_SECONDS = 30.0, 300.0
ENOUGH_REQUESTS = 50


@dataclass(slots=True)
class _Stage:
    """`subject`: the revision and the stage. `before`, `restarts`: counters of each pod, by uid, when it began."""

    subject: object
    since: float | None = None  # when all its new pods were ready; None: not yet
    due: float = 0.0  # when the pods are read again
    comparison: Comparison | None = None
    before: dict[str, Traffic] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)


class CompareStage:
    """For use within one event loop. `clock` is monotonic seconds."""

    def __init__(self, reader: TrafficReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = reader, clock
        self._stages: dict[str, _Stage] = {}  # by the owner's uid

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `comparison`, where a staged shift is under way and its first new pod is ready."""
        pin = context.plan.pin
        old = last_answered(context.records, but=pin)
        shift = under_way(context.owner, pin, old, context.state)
        if shift is None or old is None or context.workload is None:
            self.forget(context.uid)
            return context
        new_ones, old_ones = (_living(context.replicas, one.revision.digest) for one in (pin, old))
        stage = self._stages.get(context.uid)
        if stage is None or stage.subject != (pin.revision.digest, shift):
            stage = self._stages[context.uid] = _Stage((pin.revision.digest, shift))
        if stage.since is None:
            settled = shift.is_settled and len(new_ones) >= shift.held and all(one.is_ready for one in new_ones)
            if not settled:
                return context
            stage.since = self._clock()
        if self._clock() >= stage.due:
            stage.due = self._clock() + READ_SECONDS
            read = self._reader.read
            new_read = await read(context.workload, _pods(new_ones), pin.revision)
            old_read = await read(context.workload, _pods(old_ones), old.revision)
            new, before = _side(stage, new_ones, new_read), _side(stage, old_ones, old_read)
            stage.comparison = self._compare(context, stage.since, new, before)
        return replace(context, comparison=stage.comparison)

    def _compare(self, context: ReconcileContext, since: float, new: Side, old: Side) -> Comparison:
        seconds = self._clock() - since
        enough = seconds >= LEAST_SECONDS and new.stage.finished >= ENOUGH_REQUESTS
        worse = why_worse(new, old, itl_objective_seconds(context.owner))
        return Comparison(in_words(new, old), (enough or seconds >= MOST_SECONDS) and worse is None, worse)

    def forget(self, uid: str) -> None:
        self._stages.pop(uid, None)


def _living(replicas: Sequence[Replica], digest: str) -> list[Replica]:
    return [one for one in replicas if one.digest == digest and not one.is_terminating]


def _pods(replicas: Sequence[Replica]) -> list[Manifest]:
    """Return the first pods of those that are ready."""
    return [one.pods[0] for one in replicas if one.is_ready]


def _side(stage: _Stage, replicas: Sequence[Replica], read: Mapping[str, Traffic]) -> Side:
    """Return what one revision's pods answered. Of a pod that is new here, the stage begins now."""
    restarts = 0
    for one in replicas:
        count = sum(int(runtime_status(pod).get("restartCount", 0)) for pod in one.pods)
        restarts += max(0, count - stage.restarts.setdefault(one.uid, count))
    in_stage = [traffic.since(stage.before.setdefault(uid, traffic)) for uid, traffic in read.items()]
    return Side(total(read.values()), total(in_stage), restarts, len(read))
