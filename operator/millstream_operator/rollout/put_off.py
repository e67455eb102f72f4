"""Put a rollout off whose GPUs were taken after an old pod was drained: the last good revision is put back. Pure.

    old pod drained, no GPU for the new one, the last good revision can start -> put off: that one runs
    its pods are coming up, and no GPU is free for the new revision          -> put off
    they serve: ResourceAware, and giving them up makes no room              -> put off
    they serve, any other strategy or room                                   -> goes on like any other rollout
    they fail, and giving them up makes room                                 -> goes on
    replicas: 0                                                              -> goes on: nothing is lost

So it never waits for the GPUs of the pods that were put back. Under Auto and Availability one more pod waits then,
which an autoscaler sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_failures import diagnose_pod
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.rollout_strategy import asked_strategy
from millstream_operator.rollout.approach import IN_PLACE, Approach, Situation, why_kept
from millstream_operator.workloads.replica import Replica


def is_put_off(one: Situation, back: Situation, approach: Approach) -> bool:
    """Whether the last good revision runs in place of the wanted one. `back`: the pods as its rollout sees them."""
    wanted, marks = one.owner.spec.replicas, one.marks
    if marks.answered or wanted == 0:
        return False
    if marks.put_off:
        return _still_waits(one, back, approach)
    drained = one.has_begun and (marks.strategy is IN_PLACE or asked_strategy(one.owner) is IN_PLACE)
    if not drained or not one.waiting or len(one.waiting) < len(one.new):
        return False
    if len(one.serving) >= wanted:
        return False  # nothing was given up
    return one.room(()).now is False and back.room(()).now is True


def _still_waits(one: Situation, back: Situation, approach: Approach) -> bool:
    if one.room(()).now is True:
        return False
    placed = [old for old in one.old if old.is_scheduled]
    if not one.serving:
        return not _fail_and_make_room(one, placed)
    comes_up = any(not old.is_ready and not _fails(old) for old in placed)
    if comes_up or (len(placed) < one.owner.spec.replicas and back.room(()).now is True):
        return True
    return approach.holds  # else it is blocked or goes on like any other rollout, with a pod that waits


def _fail_and_make_room(one: Situation, placed: Sequence[Replica]) -> bool:
    if not placed or not all(map(_fails, placed)):
        return False
    return any(old.uid not in one.room(placed).kept for old in placed)


def _fails(replica: Replica) -> bool:
    return any(diagnose_pod(pod) is not None for pod in replica.pods)


def put_off_because(one: Situation, put_back: str) -> Diagnosis:
    """What it waits for. `put_back`: the name of the revision that runs."""
    room = one.room(one.serving)
    held = why_kept(one.serving, room)
    return Diagnosis(
        Reason.GPUS_TAKEN,
        f"The GPUs of the pod that was drained for the new one were taken by another pod, so revision {put_back} was "
        f"put back. The rollout waits for {room.needs}, free or together with what the pods hold"
        f"{f' ({held})' if held else ''}.",
        "Free such GPUs or add a node, or change the spec.",
    )
