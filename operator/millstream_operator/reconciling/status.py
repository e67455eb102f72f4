"""From what was seen to the status that is written. Pure.

    Ready = the pods of the wanted revision, all of them, are available, nothing else runs,
            and the model answered through its Service

Ready is the summary. `Available` says whether anything serves at all, so during a rollout it stays True while Ready
is False. `Reconciling` and `Stalled` exclude each other, as kstatus wants it: on its way, or waiting for a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.reconciling import conditions
from millstream_operator.reconciling.conditions import Condition
from millstream_operator.reconciling.decisions import Decision, journal
from millstream_operator.reconciling.diagnosis import Diagnosis, diagnose, diagnose_replica_failure
from millstream_operator.reconciling.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.reconciling.rollout import Intent
from millstream_operator.reconciling.workload import deadline_passed, digest_of_pod, replica_failure, rolled_out
from millstream_operator.rendering.names import selector_string
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.service import service_url

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking the model through its Service. None in `failure`: it answered."""

    failure: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that the status is made from."""

    owner: LLMDeployment
    revision: Revision
    workload: Manifest | None  # the live Deployment
    pods: Sequence[Manifest] = ()
    answer: Answer | None = None  # None: not asked yet, or being asked
    problem: Diagnosis | None = None  # why the objects could not be applied
    previous: Manifest = field(default_factory=dict)  # the status before
    decisions: Sequence[Decision] = ()  # made in this turn
    intent: Intent | None = None  # of the rollout

    @property
    def running(self) -> Revision:
        """What the pods shall run: what the spec asks for, or what was put back after that failed."""
        return self.intent.running.revision if self.intent is not None else self.revision


def status_of(seen: Seen, now: str) -> Manifest:
    """The whole status, in the API's form."""
    owner, workload = seen.owner, (seen.workload or {}).get("status", {})
    found = _conditions(seen)
    generation = owner.metadata.generation or 0
    ready = found[0].status is True
    return {
        "observedGeneration": generation,
        "conditions": conditions.merged(seen.previous.get("conditions", ()), found, generation, now),
        "replicas": workload.get("replicas", 0),
        "readyReplicas": workload.get("readyReplicas", 0),
        "updatedReplicas": workload.get("updatedReplicas", 0),
        "availableReplicas": workload.get("availableReplicas", 0),
        "selector": selector_string(owner.name),
        "url": service_url(owner),
        "model": {"servedName": seen.running.served_name or owner.served_name},
        "plan": seen.revision.plan,
        "runtime": {"image": seen.revision.image},
        "rollout": _rollout(seen, ready),
        "decisions": journal(seen.previous.get("decisions", ()), seen.decisions, now),
    }


def status_of_invalid(
    previous: Manifest, generation: int, problem: Diagnosis, now: str, plan: Manifest | None = None
) -> Manifest:
    """A spec that this version cannot read or run: say so, and leave all else, for the last good state serves on.

    `plan` is what was planned and not applied, for the person who wants to know what it would have been.
    """
    found = [
        Condition(conditions.READY, False, problem.reason, problem.message),
        Condition(conditions.PLANNED, False, problem.reason, problem.message),
        Condition(conditions.STALLED, True, problem.reason, problem.message),
    ]
    kept = [c for c in previous.get("conditions", ()) if c["type"] in (conditions.AVAILABLE, conditions.MODEL_READY)]
    return (
        previous
        | ({"plan": plan} if plan is not None else {})
        | {
            "observedGeneration": generation,
            "conditions": [*conditions.merged(previous.get("conditions", ()), found, generation, now), *kept],
        }
    )


def _rollout(seen: Seen, ready: bool) -> Manifest:
    found: Manifest = {
        "currentRevision": seen.revision.name if ready else seen.previous.get("rollout", {}).get("currentRevision"),
        "updateRevision": seen.revision.name,
        "availableReplicas": (
            seen.owner.spec.replicas
            if rolled_out(seen.owner, seen.revision, seen.workload)
            else _updated_and_available(seen)
        ),
    }
    if (intent := seen.intent) is not None:
        if intent.failure is not None:
            found["currentRevision"] = intent.running.revision.name
        found |= {"strategy": intent.strategy.value, "phase": intent.phase.value}
    return {name: value for name, value in found.items() if value is not None}


def _conditions(seen: Seen) -> list[Condition]:
    obstacle = _obstacle(seen)
    ready = _ready(seen, obstacle)
    found = [
        ready,
        Condition(conditions.PLANNED, True, Reason.PLANNED, seen.revision.plan["summary"]),
        _available(seen),
        _model_ready(seen),
    ]
    if seen.problem is not None and seen.problem.reason is Reason.NAME_CONFLICT:
        found.append(Condition(conditions.NAME_CONFLICT, True, seen.problem.reason, seen.problem.message))
    if ready.status is not True and ready.reason is not Reason.SCALED_TO_ZERO:
        found.append(_reconciling_or_stalled(seen, ready))
    return found


def _ready(seen: Seen, obstacle: Diagnosis | None) -> Condition:
    def no(reason: Reason, message: str) -> Condition:
        return Condition(conditions.READY, False, reason, message)

    if obstacle is not None:
        return no(obstacle.reason, obstacle.message)
    if seen.owner.spec.replicas == 0 and rolled_out(seen.owner, seen.revision, seen.workload):
        return no(Reason.SCALED_TO_ZERO, "spec.replicas is 0: nothing serves.")
    if not rolled_out(seen.owner, seen.revision, seen.workload):
        return _progress(seen)
    if seen.answer is None:
        return no(Reason.ASKING_MODEL, "The pods are available; asking the model through its Service.")
    if seen.answer.failure is not None:
        return no(seen.answer.failure.reason, seen.answer.failure.message)
    return Condition(conditions.READY, True, Reason.READY, f"The model answers at {service_url(seen.owner)}.")


def _progress(seen: Seen) -> Condition:
    available, wanted = _updated_and_available(seen), seen.owner.spec.replicas
    in_place = seen.intent is not None and seen.intent.strategy is AppliedStrategy.RESOURCE_AWARE
    first = not seen.previous.get("rollout", {}).get("currentRevision")
    return Condition(
        conditions.READY,
        False,
        Reason.STARTING if first else Reason.ROLLING_OUT,
        f"{available} of {wanted} replicas of revision {seen.revision.name} available."
        + (" The pods are replaced in place: an old one is drained before its successor starts." if in_place else ""),
    )


def _updated_and_available(seen: Seen) -> int:
    ready = [pod for pod in _own_pods(seen) if conditions.find(_pod_conditions(pod), "Ready").get("status") == "True"]
    return min(len(ready), seen.owner.spec.replicas)


def _obstacle(seen: Seen) -> Diagnosis | None:
    """The first thing that is in the way, from the outside in."""
    if seen.problem is not None:
        return seen.problem
    if seen.intent is not None and (failure := seen.intent.failure) is not None:
        return Diagnosis(
            Reason.ROLLED_BACK,
            f"Rolled back to revision {seen.running.name}, because revision {seen.revision.name} failed. "
            f"{failure.reason}: {failure.message} Change the spec to try again.",
        )
    if rolled_out(seen.owner, seen.revision, seen.workload):
        return None
    if (found := diagnose(_own_pods(seen))) is not None:
        return _with_a_way_out(seen, found)
    if (told := replica_failure(seen.workload, seen.revision.digest)) is not None:
        return diagnose_replica_failure(told)
    return _deadline_passed(seen)


def _with_a_way_out(seen: Seen, found: Diagnosis) -> Diagnosis:
    """Who insists on a surge that finds no GPU waits for ever, and may not know of the other way."""
    surges = seen.intent is not None and seen.intent.strategy is AppliedStrategy.AVAILABILITY
    if found.reason is not Reason.INSUFFICIENT_GPU or not surges or not _older_pods_serve(seen):
        return found
    hint = "Older pods serve on; rollout.strategy ResourceAware would replace them in place."
    return Diagnosis(found.reason, f"{found.message} {hint}")


def _older_pods_serve(seen: Seen) -> bool:
    return any(
        digest_of_pod(pod) != seen.revision.digest
        and conditions.find(_pod_conditions(pod), "Ready").get("status") == "True"
        for pod in seen.pods
    )


def _deadline_passed(seen: Seen) -> Diagnosis | None:
    if not deadline_passed(seen.workload, seen.revision.digest):
        return None
    return Diagnosis(Reason.PROGRESS_DEADLINE_EXCEEDED, "The rollout made no progress within rollout.progressDeadline.")


def _available(seen: Seen) -> Condition:
    count = (seen.workload or {}).get("status", {}).get("availableReplicas", 0)
    if count:
        return Condition(conditions.AVAILABLE, True, Reason.AVAILABLE, "At least one replica serves.")
    if seen.owner.spec.replicas == 0:
        return Condition(conditions.AVAILABLE, False, Reason.SCALED_TO_ZERO, "spec.replicas is 0: nothing serves.")
    return Condition(conditions.AVAILABLE, False, Reason.NO_REPLICA_AVAILABLE, "No replica serves.")


def _model_ready(seen: Seen) -> Condition:
    """Does the model answer through its Service, with the wanted configuration?"""
    if not rolled_out(seen.owner, seen.running, seen.workload) or seen.owner.spec.replicas == 0:
        reason = Reason.SCALED_TO_ZERO if seen.owner.spec.replicas == 0 else Reason.NO_REPLICA_AVAILABLE
        if (seen.workload or {}).get("status", {}).get("availableReplicas", 0):
            reason = Reason.ROLLING_OUT
        return Condition(conditions.MODEL_READY, False, reason, "It is asked when all replicas are available.")
    if seen.answer is None:
        return Condition(conditions.MODEL_READY, None, Reason.ASKING_MODEL, "It is being asked.")
    if seen.answer.failure is not None:
        return Condition(conditions.MODEL_READY, False, seen.answer.failure.reason, seen.answer.failure.message)
    return Condition(conditions.MODEL_READY, True, Reason.ANSWERING, "It answered through its Service.")


def _reconciling_or_stalled(seen: Seen, ready: Condition) -> Condition:
    late = _deadline_passed(seen)
    if ready.reason in NEEDS_A_PERSON:
        return Condition(conditions.STALLED, True, ready.reason, ready.message)
    if late is not None:
        return Condition(conditions.STALLED, True, late.reason, late.message)
    return Condition(conditions.RECONCILING, True, ready.reason, ready.message)


def _own_pods(seen: Seen) -> list[Manifest]:
    """Pods of the wanted revision; those of an older one may fail as they like."""
    return [pod for pod in seen.pods if digest_of_pod(pod) == seen.revision.digest]


def _pod_conditions(pod: Manifest) -> list[Manifest]:
    found: list[Manifest] = pod.get("status", {}).get("conditions") or []
    return found
