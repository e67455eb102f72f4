"""What a new process believes of a status that was written before it began, until it has found out for itself.

Two questions cost more than the rest of a turn: does the model answer (two requests, and a token is generated), and
would a plan of today be another one. After a restart both would come for every LLMDeployment at once, and nothing of
what they are about has changed. So where the status says Ready of this generation and of these pods, its word is taken
at first, and each question is asked at a random time within the next minute. Children are compared at once: a hand edit
that was made while no operator ran is repaired by the first turn.
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
    """Of an earlier process. `answered`: the revision whose model answered."""

    answered: str
    outdated: Diagnosis | None = None


class StatusRestorer:
    """For one process. `later` brings a key back after so many seconds; None: everything is asked at once."""

    def __init__(self, later: EnqueueAfter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._later, self._clock = later, clock
        self._ends: dict[str, float] = {}  # by uid: when the questions are to be asked

    def restore(
        self, owner: LLMDeployment, key: OwnerKey, status: Manifest, pods: Sequence[Manifest]
    ) -> RestoredStatus | None:
        """What may be taken from the status; None: nothing, or no longer."""
        uid, now = owner.metadata.uid or "", self._clock()
        ends = self._ends.get(uid, float("inf"))
        found = read_restored_status(owner, status, pods) if self._later is not None and now < ends else None
        if found is None or self._later is None:
            self._ends[uid] = float("-inf")
            return None
        if ends == float("inf"):
            ends = self._ends[uid] = now + random.uniform(SOONEST_SECONDS, LATEST_SECONDS)  # noqa: S311 - jitter
        self._later(key, ends - now)
        return found

    def forget(self, uid: str) -> None:
        self._ends.pop(uid, None)


def read_restored_status(owner: LLMDeployment, status: Manifest, pods: Sequence[Manifest]) -> RestoredStatus | None:
    """What a status tells of an earlier process' questions; None where it is not about this spec and these pods. Pure.

    A pod that got ready after the LLMDeployment did was perhaps never asked.
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
