"""PodsScheduled and WarmedUp: how far the pods of the wanted revision have come. Pure.

Each gives the reason why it does not hold, so that `kubectl describe` shows the part that is blocked, and everything
before it True.
"""

from __future__ import annotations

from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import is_scheduled
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.status.observation import Observation
from millstream_operator.status.scaling import BEFORE_A_NODE, no_room

_REMOVED = "The pods of the wanted revision were removed; the last good revision runs."


def pods_scheduled(observation: Observation, blocker: Diagnosis | None) -> Condition:
    """True when every replica of the wanted revision has its pod, and every pod has a node."""
    kind, wanted = conditions.PODS_SCHEDULED, observation.owner.spec.replicas
    if wanted == 0:
        return Condition(kind, False, Reason.SCALED_TO_ZERO, "spec.replicas is 0: no pod is wanted.")
    if observation.rolled_out:
        return Condition(kind, True, Reason.SCHEDULED, "All pods have a node.")
    if observation.is_rolled_back:
        return Condition(kind, False, Reason.ROLLED_BACK, _REMOVED)
    room = blocker if blocker is not None else no_room(observation)
    if room is not None and room.reason in BEFORE_A_NODE:
        return Condition(kind, False, room.reason, room.message)
    living = [one for one in observation.own_replicas if not one.is_terminating]
    pods = wanted * max((one.size for one in living), default=1)
    placed = min(sum(is_scheduled(pod) for one in living for pod in one.pods), pods)
    if placed == pods:
        return Condition(kind, True, Reason.SCHEDULED, "All pods have a node.")
    gates = sorted(
        {gate["name"] for pod in observation.own_pods for gate in pod.get("spec", {}).get("schedulingGates") or ()}
    )
    held = f"; held back by the scheduling gate {', '.join(gates)}" if gates else ""
    return Condition(kind, False, _in_progress(observation), f"{placed} of {pods} pods have a node{held}.")


def warmed_up(observation: Observation, blocker: Diagnosis | None, phase: str | None) -> Condition:
    """True when every replica's model is loaded and warm. `phase` is that of the slowest pod."""
    kind, wanted = conditions.WARMED_UP, observation.owner.spec.replicas
    if wanted == 0:
        return Condition(kind, False, Reason.SCALED_TO_ZERO, "spec.replicas is 0: no pod is wanted.")
    warm = min(sum(one.is_ready and not one.is_terminating for one in observation.own_replicas), wanted)
    if observation.rolled_out or warm == wanted:
        return Condition(kind, True, Reason.WARMED_UP, "All replicas are warm.")
    if observation.is_rolled_back:
        return Condition(kind, False, Reason.ROLLED_BACK, _REMOVED)
    if blocker is not None and observation.problem is None and blocker.reason not in BEFORE_A_NODE:
        return Condition(kind, False, blocker.reason, blocker.message)
    where = f"; the slowest is in phase {phase}" if phase is not None and observation.own_pods else ""
    return Condition(kind, False, Reason.WARMING_UP, f"{warm} of {wanted} replicas are warm{where}.")


def _in_progress(observation: Observation) -> Reason:
    if observation.is_serving:
        return Reason.SCALING
    return Reason.STARTING if observation.is_first else Reason.ROLLING_OUT
