"""Stage "probe": ask the model through its Service, once per revision and set of ready pods, and now and then again.

A model may stop answering while its pods stay the same: a policy, DNS, an edited Service. So it is asked again after
some minutes, at a random time, so that a thousand models are not asked together. An answer as before writes nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.children import Children
from millstream_operator.diagnosis.conditions import READY, find
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.restored_status import EnqueueAfter
from millstream_operator.planning.measurement import PodMeasurement
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.pod_measurement import PodMeasurer
from millstream_operator.probing.probe_key import NO_KEY, ProbeKeys
from millstream_operator.probing.service_probe import ServiceAccess, ask_about_keys, probe_service
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rollout.revisions import record_of
from millstream_operator.rollout.serving_replicas import serves_while_scaling
from millstream_operator.rollout.workload import rolled_out
from millstream_operator.workloads.replica import Replica

Manifest = dict[str, Any]
# Failed probes in a row that mean nothing: the node's proxy learns of a new pod a moment after the operator.
TOLERATED_FAILURES = 4
SHORTEST_REPROBE_SECONDS, LONGEST_REPROBE_SECONDS = 240.0, 360.0
# How often a model with API keys is asked for /ready alone: a Secret that is deleted shows nowhere else.
SHORTEST_KEYS_SECONDS, LONGEST_KEYS_SECONDS = 50.0, 70.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """`subject`: the revision, Service and pods that were asked. `due`: when they are asked again.

    `keys_due`: when they are asked about their API keys alone; as `due` where there are none.
    """

    subject: object
    answer: Answer
    due: float
    keys_due: float

    def holds(self, subject: object, now: float) -> bool:
        return self.subject == subject and self.answer.failure is None and now < self.due


class ProbeStage:
    """Remembers the last answer per owner, so that a steady state asks nothing until it is due.

    `enqueue_after` requeues a key after seconds; None: nothing is asked again by itself. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        access: ServiceAccess,
        children: Children,
        keys: ProbeKeys,
        measurer: PodMeasurer,
        enqueue_after: EnqueueAfter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access, self._children, self._keys, self._measurer = access, children, keys, measurer
        self._enqueue_after, self._clock = enqueue_after, clock
        self._asked: dict[str, _Asked] = {}  # by the owner's uid
        self._failures: dict[str, int] = {}  # in a row
        self._measured: dict[str, tuple[object, PodMeasurement]] = {}  # by uid: the subject that it was measured for

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `answer`, and mark the record of a revision that answers for the first time."""
        if context.problem is not None and context.problem.reason is Reason.NAME_CONFLICT:
            return context  # the Service may be another one's
        answer = await self._ask(context)
        if answer is not None and answer.failure is None:
            await self._mark_answered(context)
        return replace(context, answer=answer)

    def has_failed(self, uid: str) -> bool:
        """Whether the last probe failed, also where the failure is still tolerated."""
        return bool(self._failures.get(uid))

    def forget(self, uid: str) -> None:
        self._asked.pop(uid, None)
        self._failures.pop(uid, None)
        self._measured.pop(uid, None)

    async def _ask(self, context: ReconcileContext) -> Answer | None:
        """The answer of these pods; a failure is asked again at the next try."""
        owner, uid, revision = context.owner, context.uid, context.running
        if not _is_asked(context):
            self.forget(uid)
            return None
        subject = (revision.name, owner.spec.service, _serving(context.replicas))
        known = self._asked.get(uid)
        # Of what runs, not of the spec: a revision that was rolled back to may need a key where the spec names none.
        needs_key = bool((revision.boot or {}).get("api_keys_file"))
        if known is not None and known.holds(subject, now := self._clock()):
            if now >= known.keys_due:
                known = self._asked[uid] = await self._ask_about_keys(owner, known)
            self._later(context, min(known.due, known.keys_due) - now)
            return known.answer
        if known is None and context.restored is not None and context.restored.answered == revision.name:
            return Answer()
        key = await self._keys.of(owner) if needs_key else NO_KEY
        answer = await probe_service(self._access, owner, revision, key)
        if answer.failure is None:
            answer = replace(answer, measured=await self._measure(context, subject))
        if answer.is_busy and _was_ready(context):
            answer = Answer()  # it serves as many as it can: whether it answers is asked when it is due again
        wait_seconds = random.uniform(SHORTEST_REPROBE_SECONDS, LONGEST_REPROBE_SECONDS)  # noqa: S311 - jitter
        due = self._clock() + wait_seconds
        self._asked[uid] = asked = _Asked(subject, answer, due, self._keys_due() if needs_key else due)
        if answer.failure is None:
            self._failures.pop(uid, None)
            self._later(context, min(due, asked.keys_due) - self._clock())
            return answer
        self._failures[uid] = self._failures.get(uid, 0) + 1
        if self._failures[uid] > TOLERATED_FAILURES:
            return answer
        # One lost probe says nothing of a model that answered before: it stays Ready until the failure is certain.
        return Answer() if _was_ready(context) else None

    async def _ask_about_keys(self, owner: LLMDeployment, known: _Asked) -> _Asked:
        """What was known, with what a pod says of its API keys now; as before where none answers."""
        problem = await ask_about_keys(self._access, owner)
        answer = replace(known.answer, keys_problem=problem) if problem is not None else known.answer
        return replace(known, answer=answer, keys_due=self._keys_due())

    def _keys_due(self) -> float:
        return self._clock() + random.uniform(SHORTEST_KEYS_SECONDS, LONGEST_KEYS_SECONDS)  # noqa: S311 - jitter

    async def _measure(self, context: ReconcileContext, subject: object) -> PodMeasurement | None:
        """What one of these pods measured: asked once, and again after no pod answered."""
        known = self._measured.get(context.uid)
        if known is not None and known[0] == subject:
            return known[1]
        if context.workload is None:
            return None
        found = await self._measurer.measure(context.workload, _own(context), context.running)
        if found is not None:
            self._measured[context.uid] = subject, found
        return found

    def _later(self, context: ReconcileContext, seconds: float) -> None:
        """Have the key back when it is due. The queue keeps the earliest time alone, so each turn says it again."""
        if self._enqueue_after is not None:
            self._enqueue_after(context.key, seconds)

    async def _mark_answered(self, context: ReconcileContext) -> None:
        """A later revision that fails goes back to one that is marked so."""
        pin = context.rollout.pin
        if context.rollout.running is pin and not pin.marks.answered:
            answered = replace(pin, marks=replace(pin.marks, answered=True))
            await self._children.apply_all(context.owner, [record_of(context.owner, answered)])


def _is_asked(context: ReconcileContext) -> bool:
    """All replicas are available, or some of a revision that answered before, while it is scaled."""
    owner, revision = context.owner, context.running
    if owner.spec.replicas == 0:
        return False
    if rolled_out(owner, revision, context.state):
        return True
    return _answered_before(context) and serves_while_scaling(revision, context.state, context.replicas)


def _answered_before(context: ReconcileContext) -> bool:
    return bool((context.previous.get("rollout") or {}).get("currentRevision") == context.running.name)


def _was_ready(context: ReconcileContext) -> bool:
    """The last status says that this revision answers, of whatever number of replicas."""
    ready = find(context.previous.get("conditions") or (), READY)
    return ready.get("reason") == Reason.READY and _answered_before(context)


def _own(context: ReconcileContext) -> list[Manifest]:
    """The first pods of the replicas that are ready and run the revision that shall run."""
    digest = context.running.digest
    return [one.pods[0] for one in context.replicas if one.is_ready and one.digest == digest]


def _serving(replicas: Sequence[Replica]) -> frozenset[str]:
    """The uids of the replicas that are ready: others are asked anew."""
    return frozenset(one.uid for one in replicas if one.is_ready)
