"""Ready, the summary, and what is in its way. Pure.

    Ready = the pods of the wanted revision, all of them, are available, nothing else runs,
            and the model answered through its Service

While it is False, `Reconciling` or `Stalled` says whether it gets there by itself; kstatus wants never both.
"""

from __future__ import annotations

from millstream_operator.reconciling import conditions
from millstream_operator.reconciling.conditions import Condition
from millstream_operator.reconciling.diagnosis import Diagnosis, diagnose, diagnose_replica_failure
from millstream_operator.reconciling.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.reconciling.seen import Seen, is_ready, revision_of
from millstream_operator.rendering.service import service_url


def ready(seen: Seen, in_the_way: Diagnosis | None) -> Condition:
    """`in_the_way` is `obstacle(seen)`."""

    def no(reason: Reason, message: str) -> Condition:
        return Condition(conditions.READY, False, reason, message)

    if in_the_way is not None:
        return no(in_the_way.reason, in_the_way.message)
    if seen.owner.spec.replicas == 0 and seen.rolled_out:
        return no(Reason.SCALED_TO_ZERO, "spec.replicas is 0: nothing serves.")
    if not seen.rolled_out:
        return _on_its_way(seen)
    if seen.answer is None:
        return no(Reason.ASKING_MODEL, "The pods are available; asking the model through its Service.")
    if seen.answer.failure is not None:
        return no(seen.answer.failure.reason, seen.answer.failure.message)
    return Condition(conditions.READY, True, Reason.READY, f"The model answers at {service_url(seen.owner)}.")


def reconciling_or_stalled(seen: Seen, summary: Condition) -> Condition | None:
    """Whether it goes on by itself or waits for a person; None when there is nothing left to do."""
    if summary.status is True or summary.reason is Reason.SCALED_TO_ZERO:
        return None
    if summary.reason in NEEDS_A_PERSON:
        return Condition(conditions.STALLED, True, summary.reason, summary.message)
    if (late := deadline_passed(seen)) is not None:
        return Condition(conditions.STALLED, True, late.reason, late.message)
    return Condition(conditions.RECONCILING, True, summary.reason, summary.message)


def obstacle(seen: Seen) -> Diagnosis | None:
    """The first thing that is in the way, from the outside in."""
    if seen.problem is not None:
        return seen.problem
    if seen.rolled_out:
        return None
    if (found := diagnose(seen.own_pods)) is not None:
        return found
    failure = conditions.find(seen.workload_status.get("conditions", ()), "ReplicaFailure")
    if failure.get("status") == "True":
        return diagnose_replica_failure(failure.get("message", ""))
    return deadline_passed(seen)


def deadline_passed(seen: Seen) -> Diagnosis | None:
    """The Deployment controller gave the rollout of the wanted revision up (it still goes on)."""
    progressing = conditions.find(seen.workload_status.get("conditions", ()), "Progressing")
    if seen.workload is None or progressing.get("reason") != Reason.PROGRESS_DEADLINE_EXCEEDED:
        return None
    if revision_of(seen.workload) != seen.revision.digest:
        return None
    if seen.workload_status.get("observedGeneration", 0) < seen.workload["metadata"]["generation"]:
        return None  # said of an older rollout
    return Diagnosis(Reason.PROGRESS_DEADLINE_EXCEEDED, "The rollout made no progress within rollout.progressDeadline.")


def _on_its_way(seen: Seen) -> Condition:
    wanted = seen.owner.spec.replicas
    available = min(sum(is_ready(pod) for pod in seen.own_pods), wanted)
    return Condition(
        conditions.READY,
        False,
        Reason.STARTING if seen.is_first else Reason.ROLLING_OUT,
        f"{available} of {wanted} replicas of revision {seen.revision.name} available.",
    )
