"""The next step of a rollout: which revision runs, how it reaches the pods, and what is announced. Pure.

    what the spec asks for, its record's marks, Deployment, pods -> RolloutStep

The Deployment controller moves the pods; the operator steers it by what it renders (template, maxSurge, maxUnavailable)
and by nothing else. Under Availability a revision that fails has one pod more than wanted, and the older ones serve.
Under ResourceAware an old pod was drained for it, so the last revision that answered is put back, and the failed one is
marked and not tried again until the spec changes. The same holds under either strategy for a revision that was adopted
(FollowOperator): the user did not ask for it, and the last good one was planned from the same spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy, RolloutPhase
from millstream_operator.diagnosis.decisions import Decision, DecisionType, attempt_of
from millstream_operator.diagnosis.pod_failures import diagnose_pod
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.rollout_strategy import asked_strategy, rollout_strategy
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.revision_marks import Failure
from millstream_operator.rollout.certain_failure import certain_failure
from millstream_operator.rollout.journal_marks import not_in_journal, with_journal
from millstream_operator.rollout.revisions import PinnedRevision, last_answered
from millstream_operator.rollout.workload import digest_of, digest_of_pod, rolled_out

Manifest = dict[str, Any]
IN_PLACE = AppliedStrategy.RESOURCE_AWARE
# Are the GPUs for one more replica of a revision free? None: unknown.
SpareGPUs = Callable[[LLMDeployment, Revision], bool | None]


@dataclass(frozen=True, slots=True)
class RolloutInput:
    """Everything that a rollout is decided from."""

    owner: LLMDeployment
    pin: PinnedRevision  # what the spec asks for
    records: Sequence[Manifest] = ()
    workload: Manifest | None = None  # the live Deployment
    pods: Sequence[Manifest] = ()
    journal: Sequence[Manifest] = ()  # status.decisions
    spare: bool | None = None
    announces: bool = True  # False: the status reports something else, so no decision is announced or marked

    @property
    def digest(self) -> str:
        return self.pin.revision.digest

    @property
    def has_begun(self) -> bool:
        return self.workload is not None and digest_of(self.workload) == self.digest

    @property
    def old_pods(self) -> list[Manifest]:
        return [
            pod
            for pod in self.pods
            if digest_of_pod(pod) != self.digest and not pod["metadata"].get("deletionTimestamp")
        ]


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """`pin`: what the spec asks for, with the marks that its record shall have; `running`: what the pods shall run."""

    pin: PinnedRevision
    running: PinnedRevision
    strategy: AppliedStrategy
    phase: RolloutPhase
    decisions: tuple[Decision, ...] = ()

    @property
    def failure(self) -> Failure | None:
        """Why the pods run something else than what the spec asks for."""
        return self.pin.marks.failure if self.running is not self.pin else None


def next_step(inputs: RolloutInput) -> RolloutStep:
    """Return what the pods shall run, and the decisions that are announced before they do."""
    strategy, why = _strategy(inputs)
    fallback = last_answered(inputs.records, but=inputs.pin)  # what a failed revision goes back to
    failure = inputs.pin.marks.failure or _new_failure(inputs, fallback)
    adopted = fallback is not None and fallback.revision.input_hash == inputs.pin.revision.input_hash
    rolls_back = strategy is IN_PLACE or adopted or inputs.pin.marks.failure is not None
    chosen = None if asked_strategy(inputs.owner) is not None else strategy
    marks = replace(inputs.pin.marks, strategy=chosen, failure=failure if rolls_back else None)
    pin = replace(inputs.pin, marks=marks)
    if marks.failure is not None and fallback is not None:
        # Its pods do not serve: they make room first, whatever the strategy of the next revision will be.
        pin, announced = _announced(inputs, pin, _rolled_back(pin, marks.failure, fallback))
        return RolloutStep(pin, fallback, IN_PLACE, RolloutPhase.ROLLED_BACK, announced)
    if rolled_out(inputs.owner, pin.revision, inputs.workload):
        return RolloutStep(pin, pin, strategy, RolloutPhase.COMPLETE)
    if failure is not None and fallback is not None:
        pin, announced = _announced(inputs, pin, _stopped(pin, failure))
        return RolloutStep(pin, pin, strategy, RolloutPhase.STOPPED, announced)
    drains = strategy is IN_PLACE and inputs.old_pods
    pin, announced = _announced(inputs, pin, *([_replacing_in_place(pin, why)] if drains else []))
    return RolloutStep(pin, pin, strategy, RolloutPhase.PROGRESSING, announced)


def _announced(
    inputs: RolloutInput, pin: PinnedRevision, *decisions: Decision
) -> tuple[PinnedRevision, tuple[Decision, ...]]:
    """The decisions that the journal lacks, and the revision with the marks that it has once they are announced."""
    if not inputs.announces:
        return pin, ()
    announced = not_in_journal(pin.marks, decisions, inputs.journal)
    return replace(pin, marks=with_journal(pin.marks, decisions, announced)), announced


# How


def _strategy(inputs: RolloutInput) -> tuple[AppliedStrategy, str]:
    """How the revision reaches the pods, and why.

    Under Auto it is chosen once per revision and kept with its record: a change of nodes in the middle of a rollout, or
    the GPU that a drained pod has just given up, must not reverse it.
    """
    if (asked := asked_strategy(inputs.owner)) is not None:
        return asked, "spec.rollout.strategy is ResourceAware"
    chosen = inputs.pin.marks.strategy
    if chosen is None and inputs.has_begun:  # a record from before there was a choice
        chosen = AppliedStrategy.AVAILABILITY
    if chosen is None:
        chosen = rollout_strategy(inputs.owner, inputs.pin.revision.plan, inputs.spare)
    if chosen is AppliedStrategy.AVAILABILITY and _surge_finds_no_gpu(inputs):
        return IN_PLACE, "its first pod finds no free GPU"
    return chosen, "no GPU is spare for one more replica"


def _surge_finds_no_gpu(inputs: RolloutInput) -> bool:
    """A new pod waits for a GPU, and there are old ones that could give theirs up."""
    if not inputs.has_begun or not inputs.old_pods:
        return False
    found = [diagnose_pod(pod) for pod in inputs.pods if digest_of_pod(pod) == inputs.digest]
    return any(diagnosis is not None and diagnosis.reason is Reason.INSUFFICIENT_GPU for diagnosis in found)


# Whether it failed


def _new_failure(inputs: RolloutInput, fallback: PinnedRevision | None) -> Failure | None:
    """A failure that is certain now. A revision that once answered is never given up: its spec is not the cause."""
    pin = inputs.pin
    if pin.marks.answered or fallback is None or fallback.revision.digest == pin.revision.digest:
        return None
    if not inputs.has_begun or rolled_out(inputs.owner, pin.revision, inputs.workload):
        return None
    found = certain_failure(inputs.digest, inputs.workload, inputs.pods)
    return Failure(str(found.reason), found.message) if found is not None else None


# The decisions


def _replacing_in_place(pin: PinnedRevision, why: str) -> Decision:
    return Decision(
        DecisionType.REPLACING_IN_PLACE,
        f"replaces the pods in place, one after another: {why}. Each old pod is drained before its successor starts.",
        attempt_of(pin.revision.name, pin.number),
    )


def _stopped(pin: PinnedRevision, failure: Failure) -> Decision:
    return Decision(
        DecisionType.ROLLOUT_STOPPED,
        "does not get ready, so it takes no more pods, and the older ones serve on: "
        f"{failure.reason}: {failure.message}",
        attempt_of(pin.revision.name, pin.number),
    )


def _rolled_back(pin: PinnedRevision, failure: Failure, fallback: PinnedRevision) -> Decision:
    return Decision(
        DecisionType.ROLLED_BACK,
        f"failed and is not tried again until the spec changes; back to revision {fallback.revision.name}. "
        f"{failure.reason}: {failure.message}",
        attempt_of(pin.revision.name, pin.number),
    )
