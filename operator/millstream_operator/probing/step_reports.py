"""Ask the pods of Jobs that make or judge a model, about once a minute, how far they are. In the background.

    reconciler: follow(owner, the pod of its Job)      this: GET /ready at the pod's address
    this:       the words change -> on_change(owner)   reconciler: of(owner) -> the words of the last change

A pod that does not answer, as of an older runtime or behind a policy, is asked less and less often, and nothing waits
for it. The words that are given stay between two questions, whatever else reconciles the owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.pod_access import PodAccess, PodUnreachable
from millstream_operator.probing.asking_when_due import AskingWhenDue
from millstream_operator.probing.step_progress import read_step_progress

log = logging.getLogger(__name__)
Manifest = dict[str, Any]

FIRST_SECONDS, INTERVAL_SECONDS, LONGEST_SECONDS = 10.0, 60.0, 960.0
MAX_CONCURRENT = 8  # requests in flight
TIMEOUT_SECONDS = 2.0


@dataclass(slots=True)
class _Followed:
    key: OwnerKey
    pod: Manifest
    due: float
    words: str | None = None
    failures: int = 0  # in a row


class StepReports(AskingWhenDue[_Followed]):
    """For use within one event loop. `clock` is monotonic seconds; `on_change` gets owners whose status may change."""

    def __init__(self, access: PodAccess, on_change: Callable[[OwnerKey], None], clock: Callable[[], float]) -> None:
        super().__init__(clock, MAX_CONCURRENT)
        self._access, self._on_change = access, on_change
        self._followed: dict[OwnerKey, _Followed] = {}

    def follow(self, key: OwnerKey, pod: Manifest | None) -> None:
        """Ask this pod of the owner from now on, and no other of it. None: none, and forget what was said."""
        if pod is None:
            self._followed.pop(key, None)
            return
        known = self._followed.get(key)
        if known is not None and known.pod["metadata"]["uid"] == pod["metadata"]["uid"]:
            known.pod = pod
            return
        self._followed[key] = _Followed(key, pod, self._clock() + FIRST_SECONDS)
        self._changed.set()

    def of(self, key: OwnerKey) -> str | None:
        """Return the progress in words; None where it is not known."""
        found = self._followed.get(key)
        return found.words if found is not None else None

    def clear(self) -> None:
        """Ask no pods: another replica leads."""
        self._followed.clear()

    def _all(self) -> Iterable[_Followed]:
        return self._followed.values()

    async def _ask(self, one: _Followed) -> None:
        words = None
        try:
            words = read_step_progress(await self._access.ready(one.pod, TIMEOUT_SECONDS))
        except PodUnreachable as reason:
            log.debug("%s: %s", one.pod["metadata"]["name"], reason)
        one.failures = 0 if words is not None else one.failures + 1
        one.due = self._clock() + min(LONGEST_SECONDS, INTERVAL_SECONDS * 2 ** min(one.failures, 4))
        if words is None or words == one.words or self._followed.get(one.key) is not one:
            return
        one.words = words
        self._on_change(one.key)
