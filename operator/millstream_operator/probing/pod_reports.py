"""Boot reports of pods that warm up: asked in the background, now and then, and only while they do.

    reconciler: follow(owner, its pods that warm up)          ask: GET /ready at the pod's address
    this:       ask them, a few at a time, ever more seldom -> news(owner) when an answer says something new
    reconciler: of(owner) -> what was told last, by pod

A pod that does not answer holds nobody up: reconciling reads what is known and never waits. A pod that is ready, or
gone, is no longer followed, so a steady state asks nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.diagnosis.pod_facts import warmup_budget_seconds
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.pod_access import PodAccess, PodUnreachable
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

AT_ONCE = 16  # questions under way
TIMEOUT_SECONDS = 2.0
FIRST_SECONDS, SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 3.0, 30.0
INTERVAL_SHARE = 0.1  # of the time that the pod has been followed
LEAST_STALL_SECONDS = 60.0
ETA_NEWS_SHARE = 0.2


@dataclass(slots=True)
class _Followed:
    key: OwnerKey
    pod: Manifest
    since: float
    due: float
    report: PodReport | None = None
    moved_at: float = 0.0
    asked_at: float = 0.0


class PodReports:
    """For use within one event loop. `clock` is monotonic, in seconds; `news` is told whose status may change."""

    def __init__(self, access: PodAccess, news: Callable[[OwnerKey], None], clock: Callable[[], float]) -> None:
        self._access, self._news, self._clock = access, news, clock
        self._followed: dict[OwnerKey, dict[str, _Followed]] = {}  # by the pod's uid
        self._changed = asyncio.Event()

    def follow(self, key: OwnerKey, pods: Sequence[Manifest]) -> None:
        """Ask these pods of the owner from now on, and no others of it."""
        known, now = self._followed.pop(key, {}), self._clock()
        wanted: dict[str, _Followed] = {}
        for pod in pods:
            uid = pod["metadata"]["uid"]
            wanted[uid] = known.get(uid) or _Followed(key, pod, since=now, due=now + FIRST_SECONDS)
            wanted[uid].pod = pod
        if wanted:
            self._followed[key] = wanted
            self._changed.set()

    def of(self, key: OwnerKey) -> dict[str, PodReport]:
        """The last reports of the owner's followed pods, by their uids; what remains is counted from now."""
        followed, now = self._followed.get(key, {}), self._clock()
        return {uid: aged(one.report, now - one.asked_at) for uid, one in followed.items() if one.report is not None}

    def clear(self) -> None:
        """Ask nobody: another replica leads."""
        self._followed.clear()

    async def run(self) -> None:
        """For ever: ask whom it is time to ask."""
        while True:
            await self._until_due()
            await self.ask_due()

    async def ask_due(self) -> None:
        """Ask everybody whose time has come, a few at a time."""
        now = self._clock()
        due = sorted((one for one in self._all() if one.due <= now), key=lambda one: one.due)
        await asyncio.gather(*(self._ask(one) for one in due[:AT_ONCE]))

    def _all(self) -> Iterator[_Followed]:
        return (one for pods in self._followed.values() for one in pods.values())

    async def _until_due(self) -> None:
        self._changed.clear()
        due = min((one.due for one in self._all()), default=None)
        try:
            await asyncio.wait_for(self._changed.wait(), None if due is None else max(0.0, due - self._clock()))
        except TimeoutError:
            return

    async def _ask(self, one: _Followed) -> None:
        body: object = None
        try:
            body = await self._access.ready(one.pod, TIMEOUT_SECONDS)
        except PodUnreachable as reason:
            log.debug("%s: %s", one.pod["metadata"]["name"], reason)
        now = self._clock()
        one.due = now + min(LONGEST_SECONDS, max(SHORTEST_SECONDS, INTERVAL_SHARE * (now - one.since)))
        if (boot := read_boot_report(body)) is None:
            return
        one.moved_at = _moved_at(one, boot, now)
        allowed = max(LEAST_STALL_SECONDS, (warmup_budget_seconds(one.pod) or 0.0) / 2)
        warms_up = boot.phase not in (READY, UNRESPONSIVE)
        before, one.report = one.report, PodReport(boot, now - one.moved_at > allowed and warms_up)
        is_news, one.asked_at = _is_news(before, one.report, now - one.asked_at), now
        if is_news and one in self._followed.get(one.key, {}).values():
            self._news(one.key)


def _moved_at(one: _Followed, boot: BootReport, now: float) -> float:
    """When the warm-up got further last; at a first look, the age of the phase tells."""
    if one.report is None:
        return now - (boot.seconds.get(boot.phase, 0.0) if boot.done_bytes is None else 0.0)
    was = one.report.boot
    return one.moved_at if (was.phase, was.done_bytes) == (boot.phase, boot.done_bytes) else now


def _is_news(before: PodReport | None, after: PodReport, seconds_since: float) -> bool:
    """Whether the status may change: reconciling looks closer, but should not be woken by every answer."""
    if before is None or before.is_stalled != after.is_stalled or before.boot.phase != after.boot.phase:
        return True
    was, now = before.boot.eta_seconds, after.boot.eta_seconds
    if (was is None) != (now is None) or before.boot.memory != after.boot.memory:
        return True
    return was is not None and now is not None and abs(now - (was - seconds_since)) > ETA_NEWS_SHARE * max(now, 1.0)
