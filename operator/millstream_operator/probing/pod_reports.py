"""Poll the boot reports of pods that warm up, in the background.

    reconciler: follow(owner, its pods that warm up)          poll: GET /ready at the pod's address
    this:       poll them, a few at a time, less and less often -> on_change(owner) when a report changes
    reconciler: of(owner) -> the last reports, by pod

Reconciling reads the last report and never waits for a pod. A pod that is ready or gone is no longer polled, so a
steady state costs no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.diagnosis.pod_facts import warmup_budget_seconds
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.pod_access import PodAccess, PodUnreachable
from millstream_operator.probing.asking_when_due import AskingWhenDue
from millstream_operator.probing.boot_report import (
    READY,
    UNRESPONSIVE,
    BootReport,
    PodReport,
    aged,
    read_boot_report,
)

log = logging.getLogger(__name__)
Manifest = dict[str, Any]

MAX_CONCURRENT = 16  # requests in flight
TIMEOUT_SECONDS = 2.0
FIRST_SECONDS, SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 3.0, 30.0
INTERVAL_SHARE = 0.1  # of the time that the pod has been followed
LEAST_STALL_SECONDS = 60.0
ETA_CHANGE_SHARE = 0.2


@dataclass(slots=True)
class _Followed:
    key: OwnerKey
    pod: Manifest
    since: float
    due: float
    report: PodReport | None = None
    moved_at: float = 0.0
    advanced_at: float = 0.0  # as moved_at, but what was reached before a restart of the container is no news
    furthest: dict[str, int] = field(default_factory=dict)  # bytes by phase
    is_advancing: bool = True
    polled_at: float = 0.0


class PodReports(AskingWhenDue[_Followed]):
    """For use within one event loop. `clock` is monotonic seconds; `on_change` gets owners whose status may change."""

    def __init__(self, access: PodAccess, on_change: Callable[[OwnerKey], None], clock: Callable[[], float]) -> None:
        self.access = access
        super().__init__(clock, MAX_CONCURRENT)
        self._access, self._on_change = access, on_change
        self._followed: dict[OwnerKey, dict[str, _Followed]] = {}  # by the pod's uid

    def follow(self, key: OwnerKey, pods: Sequence[Manifest]) -> None:
        """Poll these pods of the owner from now on, and no others of it."""
        known, now = self._followed.pop(key, {}), self._clock()
        wanted: dict[str, _Followed] = {}
        for pod in pods:
            uid = pod["metadata"]["uid"]
            wanted[uid] = known.get(uid) or _Followed(key, pod, since=now, due=now + FIRST_SECONDS, advanced_at=now)
            wanted[uid].pod = pod
        if wanted:
            self._followed[key] = wanted
            self._changed.set()

    def of(self, key: OwnerKey) -> dict[str, PodReport]:
        """Return the last reports of the owner's pods by uid, with the remaining time counted from now."""
        followed, now = self._followed.get(key, {}), self._clock()
        return {uid: aged(one.report, now - one.polled_at) for uid, one in followed.items() if one.report is not None}

    def advancing(self, key: OwnerKey, pods: Sequence[Manifest]) -> frozenset[str]:
        """Return the uids of those pods that may still get ready by themselves.

        These are pods whose phase or bytes moved lately, and those that were not followed long enough to know: after a
        restart of the operator, too.
        """
        followed = self._followed.get(key, {})
        uids = (str(pod["metadata"]["uid"]) for pod in pods)
        return frozenset(uid for uid in uids if uid not in followed or followed[uid].is_advancing)

    def clear(self) -> None:
        """Poll no pods: another replica leads."""
        self._followed.clear()

    def _all(self) -> Iterator[_Followed]:
        return (one for pods in self._followed.values() for one in pods.values())

    async def _ask(self, one: _Followed) -> None:
        body: object = None
        try:
            body = await self._access.ready(one.pod, TIMEOUT_SECONDS)
        except PodUnreachable as reason:
            log.debug("%s: %s", one.pod["metadata"]["name"], reason)
        now = self._clock()
        one.due = now + min(LONGEST_SECONDS, max(SHORTEST_SECONDS, INTERVAL_SHARE * (now - one.since)))
        boot = read_boot_report(body)
        if boot is not None:
            _advance(one, boot, now)
        was_advancing, one.is_advancing = one.is_advancing, now - one.advanced_at <= _allowed_seconds(one.pod)
        is_followed = one in self._followed.get(one.key, {}).values()
        if was_advancing != one.is_advancing and is_followed:
            self._on_change(one.key)
        if boot is None:
            return
        one.moved_at = _moved_at(one, boot, now)
        allowed = _allowed_seconds(one.pod)
        warms_up = boot.phase not in (READY, UNRESPONSIVE)
        before, one.report = one.report, PodReport(boot, now - one.moved_at > allowed and warms_up)
        is_significant, one.polled_at = _is_significant(before, one.report, now - one.polled_at), now
        if is_significant and is_followed:
            self._on_change(one.key)


def _allowed_seconds(pod: Manifest) -> float:
    """For how long neither phase nor bytes need to move."""
    return max(LEAST_STALL_SECONDS, (warmup_budget_seconds(pod) or 0.0) / 2)


def _advance(one: _Followed, boot: BootReport, now: float) -> None:
    """Note a phase that is new, or more bytes than ever in it: a crash loop does not advance for ever."""
    done = boot.done_bytes or 0
    if done > one.furthest.get(boot.phase, -1):
        one.furthest[boot.phase] = done
        one.advanced_at = now


def _moved_at(one: _Followed, boot: BootReport, now: float) -> float:
    """Return when the warm-up last progressed; for a first report, from the age of its phase."""
    if one.report is None:
        return now - (boot.seconds.get(boot.phase, 0.0) if boot.done_bytes is None else 0.0)
    was = one.report.boot
    return one.moved_at if (was.phase, was.done_bytes) == (boot.phase, boot.done_bytes) else now


def _is_significant(before: PodReport | None, after: PodReport, seconds_since: float) -> bool:
    """Return whether the status may change. Not every report should requeue the owner."""
    if before is None or before.is_stalled != after.is_stalled or before.boot.phase != after.boot.phase:
        return True
    was, now = before.boot.eta_seconds, after.boot.eta_seconds
    if (was is None) != (now is None) or before.boot.memory != after.boot.memory:
        return True
    return was is not None and now is not None and abs(now - (was - seconds_since)) > ETA_CHANGE_SHARE * max(now, 1.0)
