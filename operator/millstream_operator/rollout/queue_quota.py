"""Whether giving up a pod frees the quota that a new one waits for in Kueue. Pure.

    the new pod is gated by Kueue     the quota of its queue is used, whatever GPUs are free on nodes
    an old pod of the same queue      its quota is free once it has ended, and the new pod takes it
    … that asks for less, or is of another queue: it frees too little or other quota

Kueue admits the pods of a queue in its own order: a pod of another owner that has waited for longer may be admitted
first. So one pod is given up at a time, and under Auto never the last that serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.status import AppliedStrategy
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.inventory.pods import gpus_of
from millstream_operator.rendering.kueue import is_gated_by_kueue, queue_of
from millstream_operator.rollout.pod_requests import growing_requests

Manifest = dict[str, Any]
RAISE = "Raise the quota of the queue's ClusterQueue, or free some of it"


@dataclass(frozen=True, slots=True)
class QuotaWait:
    """New pods wait in this queue. `kept`: why no pod that serves is given up for them; "" where one may be.

    `by_choice`: spec.rollout.strategy keeps it, and ResourceAware would not.
    """

    queue: str
    kept: str = ""
    by_choice: bool = False

    @property
    def why(self) -> str:
        """Why pods are replaced in place."""
        return f"Kueue admits no further pod to {self._place}"

    @property
    def blocked(self) -> Diagnosis:
        detail = f"{self.why}, so the new pod waits, and the old pods serve on: {self.kept}."
        now = "; spec.rollout.strategy ResourceAware replaces the pods in place now" if self.by_choice else ""
        return Diagnosis(Reason.QUOTA_EXCEEDED, detail, f"{RAISE}{now}.")

    @property
    def _place(self) -> str:
        return f"the LocalQueue {self.queue}" if self.queue else "the pods' queue"


def quota_wait(
    new: Sequence[Manifest],
    serving: Sequence[Manifest],
    template: Manifest,
    asked: AppliedStrategy | None,
    *,
    is_last: bool,
) -> QuotaWait | None:
    """Return what the new pods wait for; None where Kueue gates none of them.

    `asked`: the strategy that the spec insists on; None for Auto. `is_last`: at most one pod serves.
    """
    waiting = [pod for pod in new if is_gated_by_kueue(pod)]
    if not waiting:
        return None
    queue = queue_of(waiting[0])
    if frees_too_little := _frees_too_little(queue, serving, template):
        return QuotaWait(queue, frees_too_little)
    if asked is AppliedStrategy.AVAILABILITY:
        return QuotaWait(queue, "Availability drains none before its successor is ready", by_choice=True)
    if asked is None and is_last:
        return QuotaWait(queue, "the only pod that serves is not given up", by_choice=True)
    return QuotaWait(queue)


def _frees_too_little(queue: str, serving: Sequence[Manifest], template: Manifest) -> str:
    if any(queue_of(pod) != queue for pod in serving):
        return "they are not all of that queue, so they hold too little of its quota"
    wanted, held = gpus_of(template), min(map(gpus_of, serving), default=0)
    if wanted > held:
        return f"the new pod asks for {wanted} GPUs, and an old one holds {held}"
    more = growing_requests(template, serving)
    return f"the new pod asks for more {' and '.join(more)} than an old one holds" if more else ""
