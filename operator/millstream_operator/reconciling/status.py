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
from millstream_operator.reconciling import conditions
from millstream_operator.reconciling.conditions import Condition
from millstream_operator.reconciling.decisions import Decision, journal
from millstream_operator.reconciling.diagnosis import Diagnosis, diagnose, diagnose_replica_failure
from millstream_operator.reconciling.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.rendering.names import REVISION_LABEL, selector_string
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


def rolled_out(owner: LLMDeployment, revision: Revision, workload: Manifest | None) -> bool:
    """All replicas run the wanted revision and are available, and no older one is left."""
    if workload is None or _revision_of(workload) != revision.digest:
        return False
    status, wanted = workload.get("status", {}), owner.spec.replicas
    return bool(
        workload["spec"].get("replicas") == wanted
        and status.get("observedGeneration", 0) >= workload["metadata"]["generation"]
        and status.get("updatedReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
    )


def status_of(seen: Seen, now: str) -> Manifest:
    """The whole status, in the API's form."""
    owner, workload = seen.owner, (seen.workload or {}).get("status", {})
    found = _conditions(seen)
    generation = owner.metadata.generation or 0
    ready = found[0].status is True
    current = seen.revision.name if ready else seen.previous.get("rollout", {}).get("currentRevision")
    return {
        "observedGeneration": generation,
        "conditions": conditions.merged(seen.previous.get("conditions", ()), found, generation, now),
        "replicas": workload.get("replicas", 0),
        "readyReplicas": workload.get("readyReplicas", 0),
        "updatedReplicas": workload.get("updatedReplicas", 0),
        "availableReplicas": workload.get("availableReplicas", 0),
        "selector": selector_string(owner.name),
        "url": service_url(owner),
        "model": _model(owner, seen.revision),
        "plan": seen.revision.plan,
        "runtime": {"image": seen.revision.image},
        "rollout": ({"currentRevision": current} if current else {}) | {"updateRevision": seen.revision.name},
        "decisions": journal(seen.previous.get("decisions", ()), seen.decisions, now),
    }


def _model(owner: LLMDeployment, revision: Revision) -> Manifest:
    resolved = revision.resolved_revision
    return {"servedName": owner.served_name} | ({"resolvedRevision": resolved} if resolved is not None else {})


def status_of_invalid(
    previous: Manifest, generation: int, problem: Diagnosis, now: str, plan: Manifest | None = None
) -> Manifest:
    """A spec that cannot be read, run, or planned yet: say so, and leave all else, for the last good state serves on.

    `plan` is what was planned and not applied, for the person who wants to know what it would have been.
    """
    found = [
        Condition(conditions.READY, False, problem.reason, problem.message),
        Condition(conditions.PLANNED, False, problem.reason, problem.message),
        Condition(
            conditions.STALLED if problem.reason in NEEDS_A_PERSON else conditions.RECONCILING,
            True,
            problem.reason,
            problem.message,
        ),
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
    first = not seen.previous.get("rollout", {}).get("currentRevision")
    return Condition(
        conditions.READY,
        False,
        Reason.STARTING if first else Reason.ROLLING_OUT,
        f"{available} of {wanted} replicas of revision {seen.revision.name} available.",
    )


def _updated_and_available(seen: Seen) -> int:
    ready = [pod for pod in _own_pods(seen) if conditions.find(_pod_conditions(pod), "Ready").get("status") == "True"]
    return min(len(ready), seen.owner.spec.replicas)


def _obstacle(seen: Seen) -> Diagnosis | None:
    """The first thing that is in the way, from the outside in."""
    if seen.problem is not None:
        return seen.problem
    if rolled_out(seen.owner, seen.revision, seen.workload):
        return None
    if (found := diagnose(_own_pods(seen))) is not None:
        return found
    told = (seen.workload or {}).get("status", {}).get("conditions", ())
    failure = conditions.find(told, "ReplicaFailure")
    if failure.get("status") == "True":
        return diagnose_replica_failure(failure.get("message", ""))
    return _deadline_passed(seen)


def _deadline_passed(seen: Seen) -> Diagnosis | None:
    workload = seen.workload or {}
    progressing = conditions.find(workload.get("status", {}).get("conditions", ()), "Progressing")
    if progressing.get("reason") != Reason.PROGRESS_DEADLINE_EXCEEDED or _revision_of(workload) != seen.revision.digest:
        return None
    if workload["status"].get("observedGeneration", 0) < workload["metadata"]["generation"]:
        return None  # said of an older rollout
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
    if not rolled_out(seen.owner, seen.revision, seen.workload) or seen.owner.spec.replicas == 0:
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
    return [pod for pod in seen.pods if pod["metadata"].get("labels", {}).get(REVISION_LABEL) == seen.revision.digest]


def _revision_of(workload: Manifest) -> str | None:
    metadata = workload["spec"]["template"].get("metadata", {})
    found: str | None = metadata.get("labels", {}).get(REVISION_LABEL)
    return found


def _pod_conditions(pod: Manifest) -> list[Manifest]:
    found: list[Manifest] = pod.get("status", {}).get("conditions") or []
    return found
