"""Restore what an earlier process wrote to the status, until this process has verified it.

Two checks cost more than the rest of a turn: whether the model answers (two requests and a generated token), and
whether a new plan would differ. After a restart both would run for every LLMDeployment at once, although nothing has
changed. So where the status is Ready for this generation and these pods, it is restored, and each check runs at a
random time within about a minute. Children are compared at once: an edit that was made while no operator ran is
repaired by the first turn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.conditions import PLAN_OUTDATED, READY, find
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.pod_facts import condition, is_leader, is_ready
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.index import OwnerKey

Manifest = dict[str, Any]
EnqueueAfter = Callable[[OwnerKey, float], None]
SOONEST_SECONDS, LATEST_SECONDS = 10.0, 70.0


@dataclass(frozen=True, slots=True)
class RestoredStatus:
    """The results of an earlier process. `answered`: the revision whose model answered."""

    answered: str
    outdated: Diagnosis | None = None


class StatusRestorer:
    """Restores statuses, once per owner. `enqueue_after` requeues a key after seconds; None: restore nothing."""

    def __init__(self, enqueue_after: EnqueueAfter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._enqueue_after, self._clock = enqueue_after, clock
        self._ends: dict[str, float] = {}  # by uid: when the checks must run

    def restore(
        self, owner: LLMDeployment, key: OwnerKey, status: Manifest, pods: Sequence[Manifest]
    ) -> RestoredStatus | None:
        """Return what is restored from the status; None where nothing is, or no longer."""
        uid, now = owner.metadata.uid or "", self._clock()
        ends = self._ends.get(uid, float("inf"))
        found = read_restored_status(owner, status, pods) if self._enqueue_after is not None and now < ends else None
        if found is None or self._enqueue_after is None:
            self._ends[uid] = float("-inf")
            return None
        if ends == float("inf"):
            ends = self._ends[uid] = now + random.uniform(SOONEST_SECONDS, LATEST_SECONDS)  # noqa: S311 - jitter
        self._enqueue_after(key, ends - now)
        return found

    def forget(self, uid: str) -> None:
        self._ends.pop(uid, None)


def read_restored_status(owner: LLMDeployment, status: Manifest, pods: Sequence[Manifest]) -> RestoredStatus | None:
    """Read the results of an earlier process from a status; None where it is not about this spec and these pods. Pure.

    A pod that became ready after the LLMDeployment did may never have been probed.
    """
    conditions = status.get("conditions") or ()
    ready, answered = find(conditions, READY), (status.get("rollout") or {}).get("currentRevision")
    if (
        ready.get("reason") != Reason.READY
        or ready.get("observedGeneration") != owner.metadata.generation
        or not answered
    ):
        return None
    since = ready.get("lastTransitionTime", "")
    serving = [condition(pod, READY) for pod in pods if is_leader(pod) and is_ready(pod)]
    if any(one.get("lastTransitionTime", "~") > since for one in serving):
        return None
    outdated = find(conditions, PLAN_OUTDATED)
    known = next((reason for reason in Reason if reason == outdated.get("reason")), None)
    return RestoredStatus(answered, Diagnosis(known, outdated.get("message", "")) if known is not None else None)
