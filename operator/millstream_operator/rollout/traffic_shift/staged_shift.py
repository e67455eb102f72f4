"""The staged shift of one rollout: whether there is one, where it is, and what is announced. Pure.

    a qualityGate, another model or format than what answered last, 2 replicas or more, a surge   -> in stages
    anything else                                                                                 -> the gate decides

It begins with a rollout, never in the middle of one: an operator of an older version may have begun that. It ends, and
the rollout goes on as any other, when its last stage passed, and where the gate is taken out of the spec, the strategy
becomes ResourceAware or fewer than 2 replicas are wanted.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api import duration
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.decisions import Decision, DecisionType, attempt_of
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.pod_facts import condition, is_ready, parse_time
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.rollout_strategy import asked_strategy
from millstream_operator.planning.timeouts import progress_deadline_seconds
from millstream_operator.rendering.revision_marks import Failure
from millstream_operator.rollout.approach import IN_PLACE, SURGE, Approach, Situation
from millstream_operator.rollout.revisions import PinnedRevision
from millstream_operator.rollout.traffic_shift.stages import (
    LEAST_REPLICAS,
    Shift,
    answers_differently,
    begin,
    next_shift,
    scaled,
    stages,
)
from millstream_operator.workloads.workload import WorkloadState

Manifest = dict[str, Any]
READ_SECONDS = 10.0  # between two readings of the pods


@dataclass(frozen=True, slots=True)
class Comparison:
    """New and old pods compared so far in this stage. `worse`: why the new ones are; `passed`: the stage may end."""

    words: str
    passed: bool = False
    worse: str | None = None


def shifts(owner: LLMDeployment, pin: PinnedRevision, fallback: PinnedRevision | None) -> bool:
    """Whether traffic shifts to this revision in stages, where its rollout surges. `fallback`: what answered last."""
    quantization = owner.spec.quantization
    if quantization is None or quantization.quality_gate is None or owner.spec.replicas < LEAST_REPLICAS:
        return False
    if pin.marks.answered or pin.marks.failure is not None or asked_strategy(owner) is IN_PLACE:
        return False
    return fallback is not None and answers_differently(fallback.revision, pin.revision)


def under_way(
    owner: LLMDeployment, pin: PinnedRevision, fallback: PinnedRevision | None, state: WorkloadState | None
) -> Shift | None:
    """Return the shift that the live object is in, as of the replicas that are wanted now; None where it is in none.

    Somebody else may have edited the live object, so it may hold at more than there are.
    """
    if state is None or state.held is None or state.digest != pin.revision.digest or not shifts(owner, pin, fallback):
        return None
    replicas = state.held_of or max(1, state.wanted or 1)
    return scaled(Shift(min(state.held, replicas), replicas), owner.spec.replicas)


def held_next(one: Situation, approach: Approach, now: Shift | None, *, begins: bool, passed: bool) -> Shift | None:
    """Return what to hold at in this turn; None: the rollout does not hold, or goes on to its end.

    `now`: `under_way`; `begins`: `shifts`, before the rollout has begun; `passed`: the stage was compared.
    """
    if approach.strategy is not SURGE:
        return None
    if now is None:
        return begin(one.owner.spec.replicas) if begins and not one.has_begun and one.serving else None
    if not one.old:
        return None
    return next_shift(now, len(one.new), sum(new.is_ready for new in one.new), passed=passed)


def is_late(owner: LLMDeployment, pods: Sequence[Manifest], now: str | None) -> bool:
    """Whether a new pod is not ready for `rollout.progressDeadline`: a Deployment that holds has no deadline."""
    time, limit_seconds = parse_time(now), progress_deadline_seconds(owner.spec)
    if time is None:
        return False
    return any(_waits_seconds(pod, time) > limit_seconds for pod in pods if not is_ready(pod))


def _waits_seconds(pod: Manifest, now: datetime.datetime) -> float:
    times = (pod["metadata"].get("creationTimestamp"), condition(pod, "Ready").get("lastTransitionTime"))
    known = [time for time in map(parse_time, times) if time is not None]
    return (now - max(known)).total_seconds() if known else 0.0


def itl_objective_seconds(owner: LLMDeployment) -> float | None:
    objectives = owner.spec.objectives
    if objectives is None or objectives.itl is None:
        return None
    return duration.milliseconds(objectives.itl.p95) / 1000


# The words


def is_of_a_canary(failure: Failure | None) -> bool:
    """Whether it failed because its pods answered worse than the old ones."""
    return failure is not None and failure.reason == Reason.CANARY_FAILED


def canary_failed(comparison: Comparison) -> Diagnosis:
    return Diagnosis(Reason.CANARY_FAILED, sentence(f"Compared with the old pods, {comparison.worse}"))


def shift_started(pin: PinnedRevision, fallback: PinnedRevision, shift: Shift) -> Decision:
    counts = ", ".join(str(count) for count in stages(shift.replicas))
    return Decision(
        DecisionType.TRAFFIC_SHIFT_STARTED,
        f"takes the traffic in stages: {counts} of {shift.replicas} replicas. In each its pods are compared with those "
        f"of revision {fallback.revision.name}, and if they are worse, that one is put back.",
        attempt_of(pin.revision.name, pin.number),
    )


def stage_passed(pin: PinnedRevision, shift: Shift, comparison: Comparison) -> Decision:
    attempt = f"{attempt_of(pin.revision.name, pin.number)} stage {shift.number} of {len(stages(shift.replicas))}"
    return Decision(
        DecisionType.TRAFFIC_SHIFTED,
        sentence(f"passed with {shift.target} of {shift.replicas} replicas: {comparison.words}"),
        attempt,
        str(shift.number),
    )
