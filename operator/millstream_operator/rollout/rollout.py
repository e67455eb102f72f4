"""What a rollout shall do next: which revision runs, how it reaches the pods, and what there is to say. Pure.

    what the spec asks for, its record's marks, Deployment, pods -> RolloutStep

The Deployment controller moves the pods; it is steered by what is rendered (template, maxSurge, maxUnavailable) and by
nothing else. Under Availability a revision that fails has one pod more than wanted, and the older ones serve. Under
ResourceAware an old pod was drained for it, so the last revision that answered is put back, and the failed one is not
tried again: its record says so, until the spec asks for something else. So is one that was adopted by itself
(FollowOperator), under either strategy: nobody asked for it, and the spec has what it wants without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy, RolloutPhase
from millstream_operator.diagnosis.decisions import Decision, DecisionType
from millstream_operator.diagnosis.pod_failures import diagnose_pod
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.rollout_strategy import asked_strategy, rollout_strategy
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.revision_marks import Failure
from millstream_operator.rollout.certain_failure import certain_failure
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
    """`pin` is what the spec asks for, with the marks that its record shall have; `running` what the pods shall run."""

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
    """What to bring about, and the decisions that are to be told before it is."""
    strategy, why = _strategy(inputs)
    good = last_answered(inputs.records, but=inputs.pin)
    failure = inputs.pin.marks.failure or _new_failure(inputs, good)
    adopted = good is not None and good.revision.input_hash == inputs.pin.revision.input_hash
    rolls_back = strategy is IN_PLACE or adopted or inputs.pin.marks.failure is not None
    chosen = None if asked_strategy(inputs.owner) is not None else strategy
    marks = replace(inputs.pin.marks, strategy=chosen, failure=failure if rolls_back else None)
    pin = replace(inputs.pin, marks=marks)
    if marks.failure is not None and good is not None:
        # Its pods serve nobody: they make room first, whatever the strategy of the next revision will be.
        told = (_rolled_back(pin, marks.failure, good),)
        return RolloutStep(pin, good, IN_PLACE, RolloutPhase.ROLLED_BACK, _not_in_journal(inputs, told))
    if rolled_out(inputs.owner, pin.revision, inputs.workload):
        return RolloutStep(pin, pin, strategy, RolloutPhase.COMPLETE)
    if failure is not None and good is not None:
        return RolloutStep(pin, pin, strategy, RolloutPhase.STOPPED, _not_in_journal(inputs, (_stopped(pin, failure),)))
    drains = strategy is IN_PLACE and inputs.old_pods
    announced = (_replacing_in_place(pin, why),) if drains else ()
    return RolloutStep(pin, pin, strategy, RolloutPhase.PROGRESSING, _not_in_journal(inputs, announced))


# How


def _strategy(inputs: RolloutInput) -> tuple[AppliedStrategy, str]:
    """How the revision reaches the pods, and why so.

    Under Auto it is chosen once for a revision and kept with its record: a change of nodes in the middle of a rollout,
    or the GPU that a drained pod has just given up, must not turn it round.
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


def _new_failure(inputs: RolloutInput, good: PinnedRevision | None) -> Failure | None:
    """A failure that is certain now. A revision that once answered is never given up: the spec is not what fails."""
    pin = inputs.pin
    if pin.marks.answered or good is None or good.revision.digest == pin.revision.digest:
        return None
    if not inputs.has_begun or rolled_out(inputs.owner, pin.revision, inputs.workload):
        return None
    found = certain_failure(inputs.digest, inputs.workload, inputs.pods)
    return Failure(str(found.reason), found.message) if found is not None else None


# What is said


def _replacing_in_place(pin: PinnedRevision, why: str) -> Decision:
    return Decision(
        DecisionType.REPLACING_IN_PLACE,
        f"{_attempt(pin)} replaces the pods in place, one after another: {why}. Each old pod is drained before its "
        "successor starts.",
    )


def _stopped(pin: PinnedRevision, failure: Failure) -> Decision:
    return Decision(
        DecisionType.ROLLOUT_STOPPED,
        f"{_attempt(pin)} does not get ready, so it takes no more pods, and the older ones serve on: {failure.reason}: "
        f"{failure.message}",
    )


def _rolled_back(pin: PinnedRevision, failure: Failure, good: PinnedRevision) -> Decision:
    return Decision(
        DecisionType.ROLLED_BACK,
        f"{_attempt(pin)} failed and is not tried again until the spec changes; back to revision "
        f"{good.revision.name}. {failure.reason}: {failure.message}",
    )


def _attempt(pin: PinnedRevision) -> str:
    """The number tells two attempts at the same revision apart."""
    return f"Revision {pin.revision.name} (no. {pin.number})"


def _not_in_journal(inputs: RolloutInput, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Those that the journal does not hold yet. Details may vary from turn to turn; an attempt is told of once."""
    told = {(entry["type"], entry["message"].partition(") ")[0]) for entry in inputs.journal}
    return tuple(one for one in decisions if (one.type, one.message.partition(") ")[0]) not in told)
