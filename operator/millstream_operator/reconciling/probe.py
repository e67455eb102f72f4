"""Stage "probe": ask the model through its Service, once per revision and set of ready pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.children.children import Children
from millstream_operator.diagnosis.conditions import READY, find
from millstream_operator.facts import restored_status
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.probe_key import ProbeKeys
from millstream_operator.probing.service_probe import ServiceAccess, probe_service
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rendering.names import LEADER, ROLE_LABEL
from millstream_operator.rollout.revisions import record_of
from millstream_operator.rollout.workload import rolled_out

Manifest = dict[str, Any]
# Failed probes in a row that mean nothing: the node's proxy learns of a new pod a moment after the operator.
TOLERATED_FAILURES = 4


class ProbeStage:
    """Remembers the last answer per owner, so that a steady state asks nothing."""

    def __init__(self, access: ServiceAccess, children: Children, keys: ProbeKeys) -> None:
        self._access, self._children, self._keys = access, children, keys
        # By the owner's uid: which revision, Service and pods were asked, and the answer.
        self._answers: dict[str, tuple[object, Answer]] = {}
        self._failures: dict[str, int] = {}  # in a row

    async def run(self, context: ReconcileContext) -> ReconcileContext:
        """Set `answer`, and mark the record of a revision that answers for the first time."""
        if context.problem is not None:
            return context
        answer = await self._ask(context)
        if answer is not None and answer.failure is None:
            await self._mark_answered(context)
        return replace(context, answer=answer)

    def has_failed(self, uid: str) -> bool:
        """Whether the last probe failed, also where the failure is still tolerated."""
        return bool(self._failures.get(uid))

    def forget(self, uid: str) -> None:
        self._answers.pop(uid, None)
        self._failures.pop(uid, None)

    async def _ask(self, context: ReconcileContext) -> Answer | None:
        """The answer of these pods; a failure is asked again at the next try."""
        owner, uid, revision = context.owner, context.uid, context.running
        if owner.spec.replicas == 0 or not rolled_out(owner, revision, context.workload):
            self.forget(uid)
            return None
        subject = (revision.name, owner.spec.service, _serving(context.pods))
        known = self._answers.get(uid)
        if known is not None and known[0] == subject and known[1].failure is None:
            return known[1]
        if known is None and context.restored is not None and context.restored.answered == revision.name:
            return Answer()
        answer = await probe_service(self._access, owner, revision, await self._keys.of(owner))
        self._answers[uid] = (subject, answer)
        if answer.failure is None:
            self._failures.pop(uid, None)
            return answer
        self._failures[uid] = self._failures.get(uid, 0) + 1
        if self._failures[uid] > TOLERATED_FAILURES:
            return answer
        # One lost probe says nothing of a model that answered before: it stays Ready until the failure is certain.
        before = restored_status.read_restored_status(owner, context.previous, context.pods)
        return Answer() if before is not None and before.answered == revision.name else None

    async def _mark_answered(self, context: ReconcileContext) -> None:
        """A later revision that fails goes back to one that is marked so."""
        pin = context.rollout.pin
        if context.rollout.running is pin and not pin.marks.answered:
            answered = replace(pin, marks=replace(pin.marks, answered=True))
            await self._children.apply_all(context.owner, [record_of(context.owner, answered)])


def _serving(pods: Sequence[Manifest]) -> frozenset[str]:
    """The uids of the leader pods that are ready: other pods are asked anew."""
    return frozenset(
        pod["metadata"]["uid"]
        for pod in pods
        if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == LEADER
        and find(pod.get("status", {}).get("conditions") or [], READY).get("status") == "True"
    )
