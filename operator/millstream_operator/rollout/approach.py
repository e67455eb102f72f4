"""How a revision reaches the pods now, and what it waits for. Pure.

    Availability     a pod more comes up first; where it finds no GPU it waits, and every old pod serves
    ResourceAware    an old pod is drained first, only while giving up any of them makes room for the new one

    no old pod serves                        -> nothing can be lost: as the spec or the plan says
    as many new pods as wanted have a node   -> nothing to make room for: the old pods serve until these are ready
    giving up the old pods makes no room     -> no pod is drained; blocked: NoRoom
    it does, and it is the last that serves  -> under Auto a surge waits first, for a node that an autoscaler may add
    it does                                  -> in place
    a staged shift is under way              -> a surge to its end (`traffic_shift/staged_shift.py`)
    Kueue holds the new pod back             -> under Auto in place, but never the last that serves (`queue_quota.py`)

It is decided anew in every turn: where the room vanishes in the middle, the next pod is not drained.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import condition, is_scheduled, parse_time
from millstream_operator.diagnosis.pod_failures import diagnose_pod
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.inventory.room import Room
from millstream_operator.planning.rollout_strategy import asked_strategy, rollout_strategy
from millstream_operator.rendering.revision_marks import Marks
from millstream_operator.rollout.pod_requests import growing_requests
from millstream_operator.rollout.queue_quota import QuotaWait, quota_wait
from millstream_operator.workloads.replica import Replica

Manifest = dict[str, Any]
IN_PLACE, SURGE = AppliedStrategy.RESOURCE_AWARE, AppliedStrategy.AVAILABILITY
# How long the surge of a rollout waits before the only pod that serves is drained: longer than cluster autoscalers take
# to add a node with GPUs.
SURGE_PATIENCE_SECONDS = 600.0
MAX_NAMED = 3  # pods in a message
_OTHER_RESOURCE = re.compile(r"Insufficient (?!nvidia\.com/gpu)\S+")
RoomOf = Callable[[Sequence[Replica], int], Room]  # replicas that could be given up, and how many new ones wait


@dataclass(frozen=True, slots=True)
class Approach:
    """`blocked`: what the rollout waits for. `holds`: the old template stays, so that no pod is made before there is
    room. `wait_seconds`: when to look again though nothing changes. `for_now`: the strategy follows from the pods of
    this turn, and is not what Auto chose for the revision."""

    strategy: AppliedStrategy
    why: str = ""
    blocked: Diagnosis | None = None
    holds: bool = False
    wait_seconds: float | None = None
    for_now: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    """The replicas of one owner, as the rollout of one revision sees them."""

    owner: LLMDeployment
    digest: str
    plan: dict[str, Any]
    template: dict[str, Any]
    marks: Marks
    has_begun: bool
    replicas: Sequence[Replica]
    room_of: RoomOf
    now: str | None = None  # RFC 3339, UTC
    shifting: bool = False  # a staged shift is under way: each new pod takes the room of an old one that has gone

    def room(self, given_up: Sequence[Replica]) -> Room:
        """The room if these are given up. Old ones without a node take GPUs first, as new ones do."""
        waiting = [one for one in [*self.old, *self.new] if not one.is_scheduled]
        return self.room_of(given_up, len(waiting))

    @property
    def old(self) -> list[Replica]:
        return [one for one in self.replicas if one.digest != self.digest and not one.is_terminating]

    @property
    def new(self) -> list[Replica]:
        return [one for one in self.replicas if one.digest == self.digest and not one.is_terminating]

    @property
    def serving(self) -> list[Replica]:
        """Old replicas that would be missed."""
        return [one for one in self.old if one.is_ready]

    @property
    def not_serving(self) -> list[Replica]:
        """Old replicas on nodes that would not be missed. Controllers remove them before any that serve."""
        return [one for one in self.old if one.is_on_a_node and not one.is_ready]

    @property
    def is_last(self) -> bool:
        """Whether at most one replica serves, old or new."""
        return sum(one.is_ready for one in [*self.old, *self.new]) <= 1

    @property
    def waiting(self) -> list[Replica]:
        """New replicas of which no node takes a pod, for want of a GPU."""
        return [one for one in self.new if any(map(_finds_no_gpu, one.pods))]

    @property
    def placed(self) -> list[Replica]:
        """New replicas that have their nodes."""
        return [one for one in self.new if one.is_scheduled]

    @property
    def unplaced(self) -> list[Replica]:
        """New replicas with a pod that has no node, for whatever reason."""
        return [one for one in self.new if not one.is_scheduled]

    @property
    def unplaced_pods(self) -> list[Manifest]:
        return [pod for one in self.unplaced for pod in one.pods if not is_scheduled(pod)]


def choose_approach(one: Situation) -> Approach:
    """Return how the revision reaches the pods in this turn."""
    asked = asked_strategy(one.owner)
    if not one.serving:
        return _with_nothing_to_lose(one, asked)
    if len(one.placed) >= one.owner.spec.replicas:
        return Approach(SURGE)  # no new pod needs room: the old ones serve until these are ready
    if one.shifting:
        return Approach(SURGE, blocked=_waits(one, one.room(one.serving)) if one.waiting else None)
    room = one.room(one.serving)
    if asked is not SURGE and room.now is not True and _is_made_by_pods_that_do_not_serve(one):
        # In place the Deployment may have one available pod less than it wants, so no pod that serves goes as long as
        # one is missing already. Where none is, a surge has the others removed to stay within its number of pods.
        strategy = IN_PLACE if len(one.serving) < one.owner.spec.replicas else SURGE
        return Approach(strategy, "pods of an older revision that do not serve make room", for_now=True)
    if (queued := quota_wait(_pods(one.new), _pods(one.serving), one.template, asked, is_last=one.is_last)) is not None:
        return _through_the_queue(one, room, queued)
    if asked is IN_PLACE:
        if room.kept:
            return Approach(SURGE, blocked=no_room(one, room), holds=not one.has_begun)
        if (more := growing_requests(one.template, _pods(one.serving))) and not _only_gpus_are_short(one):
            return Approach(SURGE, blocked=_no_more(one, room, more))
        return Approach(IN_PLACE, "spec.rollout.strategy is ResourceAware")
    if asked is SURGE:
        return Approach(SURGE, blocked=_waits(one, room) if one.unplaced else None)
    return _auto(one, room)


def _through_the_queue(one: Situation, room: Room, queued: QuotaWait) -> Approach:
    """Kueue holds the new pod back: one old pod after another makes room in its queue, if a node takes the new one."""
    if queued.kept:
        return Approach(SURGE, blocked=queued.blocked)
    if room.kept and room.now is not True:
        return Approach(SURGE, blocked=no_room(one, room))
    return Approach(IN_PLACE, queued.why)


def _with_nothing_to_lose(one: Situation, asked: AppliedStrategy | None) -> Approach:
    if asked is not None:
        return Approach(asked, "spec.rollout.strategy is ResourceAware")
    chosen = one.marks.strategy
    if chosen is None and one.has_begun:  # a record from before there was a choice
        chosen = SURGE
    if chosen is None:
        chosen = rollout_strategy(one.owner, one.plan, one.room(()).now)
    if chosen is SURGE and one.old and one.has_begun and one.waiting:
        return Approach(IN_PLACE, "its first pod finds no free GPU")
    return Approach(chosen, "no GPU is spare for one more replica")


def _auto(one: Situation, room: Room) -> Approach:
    if not one.plan.get("gpusPerReplica") or not _wants_room(one, room):
        return Approach(SURGE)
    if room.kept:
        return Approach(SURGE, blocked=no_room(one, room))
    if (more := growing_requests(one.template, _pods(one.serving))) and not _only_gpus_are_short(one):
        return Approach(SURGE, blocked=_no_more(one, room, more))
    why = "its first pod finds no free GPU" if one.waiting else "no GPU is spare for one more replica"
    # Of several replicas the Deployment controller keeps all but one, so the last is never drained in the middle.
    if not one.is_last or (one.marks.strategy is IN_PLACE and one.owner.spec.replicas > 1):
        return Approach(IN_PLACE, why)
    if room.pool:
        return Approach(SURGE, blocked=_waits(one, room))
    seconds = _patience_left_seconds(one)
    if seconds > 0:
        return Approach(SURGE, blocked=_waits(one, room), wait_seconds=seconds)
    return Approach(IN_PLACE, why)


def _is_made_by_pods_that_do_not_serve(one: Situation) -> bool:
    """Whether removing old pods that do not serve lets a new one start: a broken edit must not block its own fix."""
    if not one.not_serving:
        return False
    kept = one.room(one.not_serving).kept
    return any(old.uid not in kept for old in one.not_serving)


def _only_gpus_are_short(one: Situation) -> bool:
    """Whether the scheduler says that a new pod finds everything but GPUs, beside the pods that serve."""
    waiting = [pod for pod in _pods(one.waiting) if _finds_no_gpu(pod)]
    said = [condition(pod, "PodScheduled").get("message") or "" for pod in waiting]
    return any(not _OTHER_RESOURCE.search(message) for message in said)


def _wants_room(one: Situation, room: Room) -> bool:
    """Whether the surge finds no GPU, or is known to find none."""
    if one.marks.strategy is IN_PLACE:
        return True
    if room.now is None:
        return one.has_begun and bool(one.waiting)
    if any(new.is_scheduled and not new.is_ready for new in one.new):
        return False  # the surge has its GPU and comes up
    return room.now is False


def _patience_left_seconds(one: Situation) -> float:
    """How much longer the surge waits before the last pod that serves is drained."""
    refused = [found for pod in one.unplaced_pods if (found := condition(pod, "PodScheduled")).get("status") == "False"]
    if not refused:  # the scheduler has not tried yet
        return SURGE_PATIENCE_SECONDS
    now, since = parse_time(one.now), _waits_since(one)
    if now is None or since is None:
        return 0.0
    return max(0.0, SURGE_PATIENCE_SECONDS - (now - since).total_seconds())


def _waits_since(one: Situation) -> datetime.datetime | None:
    """When the scheduler first found no node for a pod that still waits."""
    times = [parse_time(condition(pod, "PodScheduled").get("lastTransitionTime")) for pod in one.unplaced_pods]
    return min((time for time in times if time is not None), default=None)


# The words


def why_kept(replicas: Sequence[Replica], room: Room) -> str:
    """Why giving up each of these makes no room; "" where it does."""
    named = [f"pod {one.name}: {room.kept[one.uid]}" for one in replicas if one.uid in room.kept]
    more = f"; {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return f"{'; '.join(named[:MAX_NAMED])}{more}"


def no_room(one: Situation, room: Room) -> Diagnosis:
    """Giving up the pods that serve makes no room."""
    return Diagnosis(
        Reason.NO_ROOM,
        f"The new pods wait for {room.needs}. Draining a pod that serves makes no room for them "
        f"({why_kept(one.serving, room)}), so the old pods serve on.",
        "Free such GPUs, uncordon or add a node, or change the spec back. To replace the pods in any case, set "
        "spec.replicas to 0 and back.",
    )


def _no_more(one: Situation, room: Room, resources: Sequence[str]) -> Diagnosis:
    """The GPUs would do; whether CPUs and memory would is not known."""
    return Diagnosis(
        Reason.NO_ROOM,
        f"The new pods ask for more {' and '.join(resources)} than the pods that serve. A new pod waits for a node "
        f"that has {room.needs} and the rest, so the old pods serve on.",
        "Free such a node or add one, or ask for less in spec.podTemplate. To replace the pods in any case, set "
        "spec.replicas to 0 and back.",
    )


def _waits(one: Situation, room: Room) -> Diagnosis:
    """The surge waits, though giving up a pod would make room."""
    if room.kept:
        return no_room(one, room)
    until = _patience_ends(one)
    then = f" until {until}, then the pod that serves is replaced in place" if until else ""
    if room.pool or asked_strategy(one.owner) is SURGE:
        then = ""
    return Diagnosis(
        Reason.WAITING_FOR_NODE,
        f"The new pod waits for {room.needs}, free or on a node that an autoscaler adds{then}. The old pods serve on.",
        "Free such GPUs or add a node; spec.rollout.strategy ResourceAware replaces the pods in place now.",
    )


def _patience_ends(one: Situation) -> str | None:
    """When the wait for another node ends: a fixed time, so that the status does not vary."""
    if (since := _waits_since(one)) is None:
        return None
    ends = since + datetime.timedelta(seconds=SURGE_PATIENCE_SECONDS)
    return ends.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _finds_no_gpu(pod: Manifest) -> bool:
    found = diagnose_pod(pod)
    return found is not None and found.reason is Reason.INSUFFICIENT_GPU


def _pods(replicas: Sequence[Replica]) -> list[Manifest]:
    return [pod for one in replicas for pod in one.pods]
