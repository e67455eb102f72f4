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
from millstream_operator.api.spec import AcceleratorType, OnInsufficientEvidence
from millstream_operator.diagnosis.decisions import Decision, DecisionType, attempt_of
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.pod_facts import condition, is_ready, parse_time
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.rollout_strategy import asked_strategy
from millstream_operator.planning.timeouts import progress_deadline_seconds
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.revision_marks import Failure
from millstream_operator.rollout.approach import IN_PLACE, SURGE, Approach, Situation
from millstream_operator.rollout.revisions import PinnedRevision
from millstream_operator.rollout.traffic_shift.evidence import Evidence, stage_ends
from millstream_operator.rollout.traffic_shift.evidence_record import evidence_text
from millstream_operator.rollout.traffic_shift.stages import (
    LEAST_REPLICAS,
    Shift,
    answers_differently,
    begin,
    formats_of,
    next_shift,
    scaled,
    stages,
)
from millstream_operator.rollout.traffic_shift.traffic_judgement import Limits, Needs, in_words, needs, why_worse
from millstream_operator.workloads.workload import WorkloadState

Manifest = dict[str, Any]
READ_SECONDS = 10.0  # between two readings of the pods
DEFAULT_EVIDENCE_TIMEOUT = "2h"
SLOWER_FACTOR, MOST_PREDICTED_RATIO = 2.0, 4.0
NOT_BEGUN = Needs(0, None, ("its pods to be ready",))


@dataclass(frozen=True, slots=True)
class Comparison:
    """New and old pods compared so far. `worse`: why the new ones are; `passed`: the stage may end.

    `evidence`: what the record of the revision shall hold (`evidence_record.py`). `progress`: how much of the evidence
    the stage has, for the status. `insufficient`: stages that waited for it longer than `rollout.evidenceTimeout`.
    """

    words: str
    passed: bool = False
    worse: str | None = None
    evidence: str | None = None
    progress: str = ""
    insufficient: Diagnosis | None = None
    proven: bool = True  # False: the stage passes without the evidence that it needs


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


def limits_of(owner: LLMDeployment, new: Revision, old: Revision) -> Limits:
    """Return what the times per token are held to: the objective, or a multiple of the old pods' that the plans allow.

    Twice the ratio that the plans predict, at least 1 and at most MOST_PREDICTED_RATIO. A CPU's plan predicts no times:
    there another format may take as long as that by design (docs/quantization.md).
    """
    objectives = owner.spec.objectives
    if objectives is not None and objectives.itl is not None:
        return Limits(duration.milliseconds(objectives.itl.p95) / 1000)
    new_time, old_time = (_predicted_microseconds(one) for one in (new, old))
    ratio = 1.0
    if new_time and old_time:
        ratio = new_time / old_time
    elif new.plan.get("accelerator") == AcceleratorType.CPU and formats_of(new) != formats_of(old):
        ratio = MOST_PREDICTED_RATIO
    return Limits(factor=SLOWER_FACTOR * max(1.0, min(ratio, MOST_PREDICTED_RATIO)))


def _predicted_microseconds(revision: Revision) -> int:
    """Return the time per token that the plan of a revision predicts; 0: it predicts none."""
    time = (revision.plan.get("predicted") or {}).get("itlMicroseconds")
    return time if isinstance(time, int) else 0


def evidence_timeout_seconds(owner: LLMDeployment) -> float:
    rollout = owner.spec.rollout
    return float(duration.seconds((rollout.evidence_timeout if rollout else None) or DEFAULT_EVIDENCE_TIMEOUT))


def proceeds(owner: LLMDeployment) -> bool:
    """Whether a stage that lacks evidence ends after the timeout."""
    rollout = owner.spec.rollout
    return rollout is None or rollout.on_insufficient_evidence is not OnInsufficientEvidence.HOLD


def compared(owner: LLMDeployment, shift: Shift, evidence: Evidence, limits: Limits, *, settled: bool) -> Comparison:
    """Return what the evidence says of the shift. `settled`: all pods of this stage are ready, so that it may end."""
    has_begun = evidence.stage is not None and evidence.stage.percent >= shift.percent
    worse, needed = why_worse(evidence, limits), needs(evidence, limits) if has_begun else NOT_BEGUN
    is_over = shift.percent <= evidence.passed  # of another number of replicas: an autoscaler acted
    waited_seconds = evidence.stage.waited_seconds if evidence.stage is not None else 0.0
    timed_out = (
        settled
        and has_begun
        and not is_over
        and not needed.are_met
        and waited_seconds >= evidence_timeout_seconds(owner)
    )
    passed = settled and worse is None and (is_over or needed.are_met or (timed_out and proceeds(owner)))
    proven = is_over or needed.are_met
    if passed:
        evidence = stage_ends(evidence, shift.percent, proven=proven)
    return Comparison(
        in_words(evidence) if proven else f"{in_words(evidence)}. {_lacks(owner, needed)}",
        passed,
        worse,
        evidence_text(evidence),
        "" if is_over else progress_of(shift, needed),
        insufficient_evidence(owner, shift, evidence, needed if timed_out and not passed else None),
        proven,
    )


# The words


def is_of_a_canary(failure: Failure | None) -> bool:
    """Whether it failed because its pods answered worse than the old ones."""
    return failure is not None and failure.reason == Reason.CANARY_FAILED


def canary_failed(comparison: Comparison) -> Diagnosis:
    return Diagnosis(Reason.CANARY_FAILED, sentence(f"Compared with the old pods, {comparison.worse}"))


def progress_of(shift: Shift, needed: Needs) -> str:
    """Return the stage and its evidence in numbers. They are rounded, so that the status changes seldom."""
    about = f"about {rounded_up(needed.needed)}" if needed.needed is not None else "an unknown number"
    missing = f"; it waits for {' and for '.join(needed.missing)}" if needed.missing else ""
    return f"{shift}: {rounded_down(needed.requests)} of {about} requests{missing}"


def rounded_down(count: int) -> int:
    """Return the number with its first digit alone."""
    unit = int(10 ** max(0, len(str(count)) - 1))
    return count // unit * unit


def rounded_up(count: int) -> int:
    """Return the number with its first digit alone, or the next such number."""
    unit = int(10 ** max(0, len(str(count)) - 1))
    return -(-count // unit) * unit


def _lacks(owner: LLMDeployment, needed: Needs) -> str:
    after = (owner.spec.rollout.evidence_timeout if owner.spec.rollout else None) or DEFAULT_EVIDENCE_TIMEOUT
    return (
        f"After {after} it still lacks {' and '.join(needed.missing)}, and goes on because "
        "spec.rollout.onInsufficientEvidence is Proceed"
    )


def insufficient_evidence(
    owner: LLMDeployment, shift: Shift, evidence: Evidence, waits: Needs | None
) -> Diagnosis | None:
    """Return what the condition says. `waits`: what the stage lacks that is held now; None: it is not held."""
    after = (owner.spec.rollout.evidence_timeout if owner.spec.rollout else None) or DEFAULT_EVIDENCE_TIMEOUT
    if waits is not None:
        return Diagnosis(
            Reason.WAITING_FOR_EVIDENCE,
            f"After {after}, {shift} still waits for {' and for '.join(waits.missing)}. Its pods serve on, and so do "
            "the old ones, because spec.rollout.onInsufficientEvidence is Hold.",
            "Send requests to it, or set spec.rollout.onInsufficientEvidence to Proceed.",
        )
    if not evidence.unproven:
        return None
    stages_named = ", ".join(f"{percent} %" if percent else "one pod" for percent in evidence.unproven)
    return Diagnosis(
        Reason.PROCEEDED_WITHOUT_EVIDENCE,
        f"Stages passed without the evidence that they need within {after}: {stages_named}. "
        "spec.rollout.onInsufficientEvidence is Proceed.",
        "To hold the next shift instead, set it to Hold.",
    )


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
        sentence(
            f"{'passed' if comparison.proven else 'goes on without enough evidence'} with {shift.target} of "
            f"{shift.replicas} replicas: {comparison.words}"
        ),
        attempt,
        str(shift.number),
    )
