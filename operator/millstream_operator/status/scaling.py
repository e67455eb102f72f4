"""Scaling a revision that serves: how far it is, and what keeps new replicas from starting. Pure.

A replica that cannot start because no node or no quota has room for it takes nothing away from those that serve. So it
is a condition, ReplicasBlocked, and Ready stays True. It is shown at once; how long it has lasted is its
lastTransitionTime. A replica that starts and fails is a failure of the model, and Ready says so.
"""

from __future__ import annotations

from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.admission import pods_not_created
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_failures import diagnose
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.rollout import workload
from millstream_operator.status.observation import Observation

# Reasons that block a pod before it has a node.
BEFORE_A_NODE = frozenset(
    {
        Reason.ADMISSION_DENIED,
        Reason.ADMISSION_UNAVAILABLE,
        Reason.GPUS_TAKEN,
        Reason.INSUFFICIENT_GPU,
        Reason.NO_ROOM,
        Reason.QUOTA_EXCEEDED,
        Reason.UNSCHEDULABLE,
        Reason.VOLUME_PENDING,
        Reason.WAITING_FOR_NODE,
    }
)
# What keeps a replica from starting, and says nothing about the model.
NO_ROOM = BEFORE_A_NODE | {Reason.EVICTED, Reason.NODE_LOST}


def no_room(observation: Observation) -> Diagnosis | None:
    """Why a replica has no place; None where each has one, or fails for another reason."""
    if (found := diagnose(observation.own_pods)) is not None:
        return found if found.reason in NO_ROOM else None
    message = workload.replica_failure(observation.state, observation.revision.digest)
    return pods_not_created(message) if message is not None else None


def replicas_blocked(observation: Observation) -> Condition | None:
    """The condition of a revision that serves with fewer replicas than wanted, for want of room."""
    if observation.rolled_out or not observation.is_serving:
        return None
    if (found := no_room(observation)) is None:
        return None
    count = f"{observation.updated_and_available} of {observation.owner.spec.replicas} replicas available"
    return Condition(conditions.REPLICAS_BLOCKED, True, found.reason, f"{count}; they serve on. {found.message}")


def replica_count(observation: Observation) -> str:
    """How many replicas serve, and how many are wanted."""
    wanted, existing = observation.owner.spec.replicas, observation.counts.get("replicas", 0)
    count = f"{observation.updated_and_available} of {wanted} replicas available; the model answers"
    return f"{count}, and {existing - wanted} of its pods must go." if existing > wanted else f"{count}."
