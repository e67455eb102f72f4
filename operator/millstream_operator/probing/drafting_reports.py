"""Ask pods that speculate, about once a minute, whether they draft and how many drafts stand. In the background.

    reconciler: follow(owner, revision, pods that speculate)     this: GET /ready at the pod's address, now and then
    this:       DraftingHistory changes -> on_change(owner)      reconciler: of(owner) -> the smoothed state

A few pods per owner are asked, a few at a time and at most ten per second of all, whatever their number: with more pods
each is asked less often. A pod that does not answer is asked less and less often, and nothing waits for it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.pod_access import PodAccess, PodUnreachable
from millstream_operator.probing.asking_when_due import AskingWhenDue
from millstream_operator.probing.drafting_history import (
    Drafting,
    DraftingHistory,
    SpeculationCounts,
    read_speculation_counts,
)

log = logging.getLogger(__name__)
Manifest = dict[str, Any]

INTERVAL_SECONDS, LONGEST_SECONDS = 60.0, 960.0
MAX_PER_SECOND = 10.0
MAX_CONCURRENT, MAX_ASKED = 8, 4  # requests in flight; pods per owner
TIMEOUT_SECONDS = 2.0


@dataclass(slots=True)
class _Asked:
    key: OwnerKey
    pod: Manifest
    due: float
    last: SpeculationCounts | None = None
    failures: int = 0  # in a row


@dataclass(slots=True)
class _Owner:
    revision: str
    history: DraftingHistory
    pods: dict[str, _Asked] = field(default_factory=dict)  # by uid


class DraftingReports(AskingWhenDue[_Asked]):
    """For use within one event loop. `clock` is monotonic seconds; `on_change` gets owners whose status may change."""

    def __init__(self, access: PodAccess, on_change: Callable[[OwnerKey], None], clock: Callable[[], float]) -> None:
        super().__init__(clock, MAX_CONCURRENT)
        self._access, self._on_change = access, on_change
        self._owners: dict[OwnerKey, _Owner] = {}

    def follow(
        self,
        key: OwnerKey,
        revision: str,
        pods: Sequence[Manifest],
        known: Drafting | None = None,
        known_for_seconds: float = 0.0,
    ) -> None:
        """Ask these pods of the owner from now on, and no others of it; none: forget what they said.

        `known`: what the status says of `revision`, and since when; it is used where this process knows nothing yet.
        """
        if not pods:
            self._owners.pop(key, None)
            return
        owner = self._owners.get(key)
        if owner is None or owner.revision != revision:
            history = DraftingHistory(known, self._clock() - known_for_seconds)
            owner = self._owners[key] = _Owner(revision, history if known is not None else DraftingHistory())
        owner.history.keep_failed([str(pod["metadata"]["name"]) for pod in pods])
        asked = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))[:MAX_ASKED]
        before, owner.pods = owner.pods, {}
        for pod in asked:
            uid = pod["metadata"]["uid"]
            owner.pods[uid] = before.get(uid) or _Asked(key, pod, due=0.0)
            owner.pods[uid].pod = pod
            if uid not in before:
                owner.pods[uid].due = self._clock() + self._interval_seconds() * random.random()  # noqa: S311 - jitter
                self._changed.set()

    def of(self, key: OwnerKey) -> Drafting | None:
        """Return what holds for the pods that are followed; None where it is not known."""
        owner = self._owners.get(key)
        return owner.history.drafting if owner is not None else None

    def clear(self) -> None:
        """Ask no pods: another replica leads."""
        self._owners.clear()

    def _all(self) -> Iterator[_Asked]:
        return (one for owner in self._owners.values() for one in owner.pods.values())

    def _interval_seconds(self) -> float:
        num_pods = sum(len(owner.pods) for owner in self._owners.values())
        return max(INTERVAL_SECONDS, num_pods / MAX_PER_SECOND)

    async def _ask(self, one: _Asked) -> None:
        counts: SpeculationCounts | None = None
        try:
            counts = read_speculation_counts(await self._access.ready(one.pod, TIMEOUT_SECONDS))
        except PodUnreachable as reason:
            log.debug("%s: %s", one.pod["metadata"]["name"], reason)
        now = self._clock()
        one.failures = 0 if counts is not None else one.failures + 1
        seconds = min(LONGEST_SECONDS, self._interval_seconds() * 2 ** min(one.failures, 4))
        one.due = now + max(seconds, self._interval_seconds()) * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
        owner = self._owners.get(one.key)
        if counts is None or owner is None or owner.pods.get(one.pod["metadata"]["uid"]) is not one:
            return
        before, one.last = one.last, counts
        growth = counts.since(before) if before is not None else None
        has_changed = owner.history.set_failed(one.pod["metadata"]["name"], has_failed=counts.drafter_failed > 0)
        if growth is not None:
            has_changed |= owner.history.add(growth, now)
        if has_changed:
            self._on_change(one.key)
