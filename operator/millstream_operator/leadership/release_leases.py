"""The Leases of other releases, each read at most every few seconds, however many LLMDeployments ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream_operator.diagnosis.pod_facts import seconds_between
from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.kinds import LEASE
from millstream_operator.leadership.ownership import LeaseSight, LeaseState, Release

READ_SECONDS = 10.0  # between two reads of one Lease
FORBIDDEN = 403


@dataclass(slots=True)
class _Known:
    """The last answer about one Lease. Times are seconds of the steady clock."""

    state: LeaseState
    renew_time: str
    read_at: float
    unchanged_since: float


class ReleaseLeases:
    """`clock`: steady seconds. `now`: RFC 3339, UTC."""

    def __init__(self, client: ClusterClient, clock: Callable[[], float], now: Callable[[], str]) -> None:
        self._client, self._clock, self._now = client, clock, now
        self._known: dict[Release, _Known] = {}

    async def look(self, release: Release) -> LeaseSight:
        """Raises ApiError, ApiUnreachable: nothing new is known."""
        known = self._known.get(release)
        if known is None or self._clock() - known.read_at >= READ_SECONDS:
            known = self._known[release] = await self._read(release, known)
        if known.state is not LeaseState.PRESENT:
            return LeaseSight(known.state)
        ago = seconds_between(known.renew_time, self._now())
        return LeaseSight(known.state, self._clock() - known.unchanged_since, ago)

    async def _read(self, release: Release, before: _Known | None) -> _Known:
        state, renew_time = LeaseState.PRESENT, ""
        try:
            lease = await self._client.get(LEASE, release.namespace, release.name)
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            lease, state = {}, LeaseState.UNREADABLE
        if lease is None:
            state = LeaseState.ABSENT
        else:
            renew_time = str((lease.get("spec") or {}).get("renewTime") or "")
        at = self._clock()
        is_same = before is not None and (before.state, before.renew_time) == (state, renew_time)
        return _Known(state, renew_time, at, before.unchanged_since if before is not None and is_same else at)
