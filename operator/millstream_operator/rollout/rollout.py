"""The next step of a rollout: which revision runs, how it reaches the pods, and what is announced. Pure.

    what the spec asks for, its record's marks, Deployment, pods -> RolloutStep

The Deployment controller moves the pods; the operator steers it by what it renders (template, maxSurge, maxUnavailable)
and by nothing else. Under Availability a revision that fails has one pod more than wanted, and the older ones serve.
No pod that serves is drained for one that could not start (`approach.py`): then the rollout is blocked, and waits.
Where the GPUs are taken after an old pod was drained, the last revision that answered is put back if it can start.

Under ResourceAware an old pod was drained for it, so the last revision that answered is put back, and the failed one is
marked. It is tried again when the spec changes, or later where the cause is not its own (`retry.py`). The same holds
under either strategy for a revision that was adopted (FollowOperator): the user did not ask for it, and the last good
one was planned from the same spec. It holds, too, for one whose pods answer worse than the old ones in a staged shift
(`traffic_shift/staged_shift.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy, RolloutPhase
from millstream_operator.diagnosis.decisions import Decision, DecisionType, attempt_of
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import is_terminating
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.inventory.room import Room
from millstream_operator.planning.rollout_strategy import asked_strategy
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.revision_marks import Failure
from millstream_operator.rollout.approach import IN_PLACE, SURGE, Approach, Situation, choose_approach, no_room
from millstream_operator.rollout.certain_failure import certain_failure
from millstream_operator.rollout.journal_marks import not_in_journal, with_journal
from millstream_operator.rollout.put_off import is_put_off, put_off_because
from millstream_operator.rollout.retry import again, failure_of
from millstream_operator.rollout.revisions import PinnedRevision, last_answered, revision_that_runs
from millstream_operator.rollout.traffic_shift.staged_shift import (
    READ_SECONDS,
    Comparison,
    canary_failed,
    held_next,
    is_late,
    is_of_a_canary,
    shift_started,
    shifts,
    stage_passed,
    under_way,
)
from millstream_operator.rollout.traffic_shift.stages import Shift
from millstream_operator.rollout.workload import rolled_out
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.replica import Replica
from millstream_operator.workloads.workload import Workload, WorkloadState, state_of

Manifest = dict[str, Any]
WAITS_FOR_A_NODE = frozenset({Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE, Reason.PROGRESS_DEADLINE_EXCEEDED})
# The room for one more replica of a revision: those that serve and could be given up, pods that end, and how many
# replicas have no node.
LookForRoom = Callable[[Revision, Sequence[Replica], Sequence[Manifest], int], Room]


def _unknown_room(revision: Revision, serving: Sequence[Replica], ending: Sequence[Manifest], waiting: int) -> Room:
    return Room()


@dataclass(frozen=True, slots=True)
class RolloutInput:
    """Everything that a rollout is decided from."""

    owner: LLMDeployment
    pin: PinnedRevision  # what the spec asks for
    records: Sequence[Manifest] = ()
    workload: Manifest | None = None  # the live object
    pods: Sequence[Manifest] = ()
    journal: Sequence[Manifest] = ()  # status.decisions
    look_for_room: LookForRoom = _unknown_room
    announces: bool = True  # False: the status reports something else, so no decision is announced or marked
    now: str | None = None  # RFC 3339, UTC
    advancing: Collection[str] = ()  # uids of pods that download or load, and whose bytes move
    workloads: Workload = DEPLOYMENTS  # what reads the live object and groups the pods
    comparison: Comparison | None = None  # of the pods of a staged shift; None: not compared in this turn

    @property
    def state(self) -> WorkloadState | None:
        return state_of(self.workloads, self.workload)

    @property
    def live_digest(self) -> str | None:
        """Of the revision that the live object makes pods of."""
        return state.digest if (state := self.state) is not None else None

    @property
    def digest(self) -> str:
        return self.pin.revision.digest

    @property
    def has_begun(self) -> bool:
        return self.live_digest == self.digest

    @property
    def situation(self) -> Situation:
        return self.situation_of(self.pin)

    def situation_of(self, pin: PinnedRevision) -> Situation:
        """As the rollout of this revision sees the pods."""
        ending = [pod for pod in self.pods if is_terminating(pod)]
        return Situation(
            self.owner,
            pin.revision.digest,
            pin.revision.plan,
            pin.revision.template,
            pin.marks,
            self.live_digest == pin.revision.digest,
            self.workloads.replicas(self.pods),
            lambda serving, waiting: self.look_for_room(pin.revision, serving, ending, waiting),
            self.now,
        )


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """`pin`: what the spec asks for, with the marks that its record shall have; `running`: what the pods shall run."""

    pin: PinnedRevision
    running: PinnedRevision
    strategy: AppliedStrategy
    phase: RolloutPhase
    decisions: tuple[Decision, ...] = ()
    blocked: Diagnosis | None = None  # what it waits for, while no pod is drained
    wait_seconds: float | None = None  # when to decide again, though nothing changes
    shift: Shift | None = None  # what the workload holds at
    comparison: Comparison | None = None  # of the pods of its staged shift, while it goes on

    @property
    def failure(self) -> Failure | None:
        """Why the pods run something else than what the spec asks for."""
        return self.pin.marks.failure if self.running is not self.pin else None


def next_step(inputs: RolloutInput) -> RolloutStep:
    """Return what the pods shall run, and the decisions that are announced before they do."""
    if not inputs.announces or (tried := again(inputs.owner, inputs.pin, inputs.now)) is None:
        return _step_of_attempt(inputs)
    attempt, retried = tried
    _, announced = _announced(inputs, attempt, retried)
    pin = replace(attempt, marks=with_journal(attempt.marks, (retried,), announced))
    step = _step_of_attempt(replace(inputs, pin=pin))
    return replace(step, decisions=(*announced, *step.decisions))


def _step_of_attempt(inputs: RolloutInput) -> RolloutStep:
    is_done = rolled_out(inputs.owner, inputs.pin.revision, inputs.state)
    fallback = last_answered(inputs.records, but=inputs.pin)  # what a failed revision goes back to
    now = under_way(inputs.owner, inputs.pin, fallback, inputs.state)
    situation = replace(inputs.situation, shifting=now is not None)
    approach = _as_it_was(inputs) if is_done else choose_approach(situation)
    adopted = fallback is not None and fallback.revision.input_hash == inputs.pin.revision.input_hash
    failure = inputs.pin.marks.failure or _new_failure(inputs, fallback, approach, now, adopted=adopted)
    asked = asked_strategy(inputs.owner)
    in_place = approach.strategy is IN_PLACE or (asked is IN_PLACE and approach.blocked is None)
    rolls_back = in_place or adopted or inputs.pin.marks.failure is not None or is_of_a_canary(failure)
    chosen = inputs.pin.marks.strategy if approach.for_now else approach.strategy
    chosen = None if asked is not None else chosen
    put_off = not is_done and _is_put_off(inputs, fallback, approach)
    failure_mark, evidence = failure if rolls_back else None, _evidence_mark(inputs, now)
    marks = replace(inputs.pin.marks, strategy=chosen, failure=failure_mark, put_off=put_off, evidence=evidence)
    pin = replace(inputs.pin, marks=marks)
    if marks.failure is not None and fallback is not None:
        return _back_to(inputs, pin, marks.failure, fallback)
    if is_done:
        return RolloutStep(pin, pin, approach.strategy, RolloutPhase.COMPLETE)
    if put_off and fallback is not None:
        return _put_off(inputs, pin, fallback)
    passed = inputs.comparison is not None and inputs.comparison.passed
    begins = shifts(inputs.owner, inputs.pin, fallback)
    shift = held_next(situation, approach, now, begins=begins, passed=passed)
    if failure is not None and fallback is not None:
        pin, announced = _announced(inputs, pin, _stopped(pin, failure, serves=bool(situation.serving)))
        return RolloutStep(pin, pin, approach.strategy, RolloutPhase.STOPPED, announced, approach.blocked, shift=shift)
    if approach.blocked is not None:
        return _blocked(inputs, pin, approach, shift)
    drains = approach.strategy is IN_PLACE and inputs.situation.old
    decisions = [_replacing_in_place(pin, approach.why)] if drains else _of_the_shift(inputs, pin, fallback, now, shift)
    pin, announced = _announced(inputs, pin, *decisions)
    wait_seconds = READ_SECONDS if shift is not None and now is not None else None
    step = RolloutStep(pin, pin, approach.strategy, RolloutPhase.PROGRESSING, announced, None, wait_seconds, shift)
    return step if shift is None else replace(step, comparison=inputs.comparison)


def _evidence_mark(inputs: RolloutInput, now: Shift | None) -> str | None:
    """What the record keeps of the staged shift while it is under way."""
    if now is None:
        return None
    return inputs.comparison.evidence if inputs.comparison is not None else inputs.pin.marks.evidence


def _of_the_shift(
    inputs: RolloutInput, pin: PinnedRevision, fallback: PinnedRevision | None, now: Shift | None, shift: Shift | None
) -> list[Decision]:
    """What the journal says of a staged shift: that it began, and each stage that passed."""
    if now is None:
        return [shift_started(pin, fallback, shift)] if shift is not None and fallback is not None else []
    has_passed = now.is_settled and shift != now
    return [stage_passed(pin, now, inputs.comparison)] if has_passed and inputs.comparison is not None else []


def _as_it_was(inputs: RolloutInput) -> Approach:
    """How a revision got there that all pods run."""
    return Approach(asked_strategy(inputs.owner) or inputs.pin.marks.strategy or SURGE)


def _back_to(inputs: RolloutInput, pin: PinnedRevision, failure: Failure, fallback: PinnedRevision) -> RolloutStep:
    """The pods of the failed revision make room first, unless one of them serves and its GPUs are of no use.

    Those of a staged shift serve: they go one by one, each for one of the old revision that comes.
    """
    back, of_a_canary = inputs.situation_of(fallback), is_of_a_canary(failure)
    blocked = None
    if not of_a_canary and back.serving and (room := back.room(back.serving)).kept:
        blocked = no_room(back, room)
    strategy = IN_PLACE if blocked is None and not of_a_canary else SURGE
    pin, announced = _announced(inputs, pin, _rolled_back(pin, failure, fallback))
    return RolloutStep(pin, fallback, strategy, RolloutPhase.ROLLED_BACK, announced, blocked)


def _blocked(inputs: RolloutInput, pin: PinnedRevision, approach: Approach, shift: Shift | None) -> RolloutStep:
    """The old pods serve on. `holds`: they are what the Deployment makes, too."""
    live = revision_that_runs(inputs.records, inputs.live_digest) if approach.holds else None
    phase, wait_seconds, held = RolloutPhase.BLOCKED, approach.wait_seconds, shift if live is None else None
    return RolloutStep(pin, live or pin, approach.strategy, phase, (), approach.blocked, wait_seconds, held)


def _put_off(inputs: RolloutInput, pin: PinnedRevision, fallback: PinnedRevision) -> RolloutStep:
    """The last good revision runs until the wanted one finds room."""
    blocked = put_off_because(inputs.situation, fallback.revision.name)
    pin, announced = _announced(inputs, pin, _put_back(pin, fallback))
    return RolloutStep(pin, fallback, IN_PLACE, RolloutPhase.BLOCKED, announced, blocked)


def _is_put_off(inputs: RolloutInput, fallback: PinnedRevision | None, approach: Approach) -> bool:
    if fallback is None or fallback.revision.digest == inputs.digest:
        return False
    return is_put_off(inputs.situation, inputs.situation_of(fallback), approach)


def _announced(
    inputs: RolloutInput, pin: PinnedRevision, *decisions: Decision
) -> tuple[PinnedRevision, tuple[Decision, ...]]:
    """The decisions that the journal lacks, and the revision with the marks that it has once they are announced."""
    if not inputs.announces:
        return pin, ()
    announced = not_in_journal(pin.marks, decisions, inputs.journal)
    return replace(pin, marks=with_journal(pin.marks, decisions, announced)), announced


# Whether it failed


def _new_failure(
    inputs: RolloutInput, fallback: PinnedRevision | None, approach: Approach, now: Shift | None, *, adopted: bool
) -> Failure | None:
    """A failure that is certain now. A revision that once answered is never given up: its spec is not the cause.

    Nor is one that only waits for room while the old pods serve; it is, where the user did not ask for it.
    """
    pin = inputs.pin
    if pin.marks.answered or fallback is None or fallback.revision.digest == pin.revision.digest:
        return None
    if not inputs.has_begun or rolled_out(inputs.owner, pin.revision, inputs.state):
        return None
    state, own = inputs.state, [pod for one in inputs.situation.new for pod in one.pods]
    if now is not None and state is not None:
        if inputs.comparison is not None and inputs.comparison.worse is not None:
            return failure_of(inputs.owner, canary_failed(inputs.comparison), pin.marks, inputs.now)
        state = replace(state, is_late=is_late(inputs.owner, own, inputs.now))
    found = certain_failure(inputs.digest, state, inputs.pods, inputs.advancing)
    if found is None:
        return None
    nothing_drained = approach.blocked is not None or len(inputs.situation.serving) >= inputs.owner.spec.replicas
    waits = nothing_drained and asked_strategy(inputs.owner) is not SURGE and not adopted
    if waits and found.reason in WAITS_FOR_A_NODE:
        return None
    return failure_of(inputs.owner, found, pin.marks, inputs.now)


# The decisions


def _replacing_in_place(pin: PinnedRevision, why: str) -> Decision:
    return Decision(
        DecisionType.REPLACING_IN_PLACE,
        f"replaces the pods in place, one after another: {why}. Each old pod is drained before its successor starts.",
        attempt_of(pin.revision.name, pin.number),
    )


def _stopped(pin: PinnedRevision, failure: Failure, *, serves: bool) -> Decision:
    """`serves`: older pods do. From 0 replicas there are none."""
    older = "the older ones serve on" if serves else "there are no older ones that serve"
    return Decision(
        DecisionType.ROLLOUT_STOPPED,
        f"does not get ready, so it takes no more pods, and {older}: {failure.reason}: {failure.message}",
        attempt_of(pin.revision.name, pin.number),
    )


def _when_again(failure: Failure) -> str:
    if failure.retry_at is None:
        return "not tried again until the spec changes or spec.rollout.retry has another value"
    return f"tried again at {failure.retry_at}"


def _rolled_back(pin: PinnedRevision, failure: Failure, fallback: PinnedRevision) -> Decision:
    return Decision(
        DecisionType.ROLLED_BACK,
        f"failed and is {_when_again(failure)}; back to revision {fallback.revision.name}. "
        f"{failure.reason}: {failure.message}",
        attempt_of(pin.revision.name, pin.number),
    )


def _put_back(pin: PinnedRevision, fallback: PinnedRevision) -> Decision:
    return Decision(
        DecisionType.PUT_OFF,
        f"waits: another pod took the GPUs that were given up for it; revision {fallback.revision.name} is put back.",
        attempt_of(pin.revision.name, pin.number),
    )
