"""Who leads? The pure half: what one replica concludes from the Lease records that it saw, on its own steady clock.

    look ─▶ held by another ─▶ wait: until it changes, or has not changed for its whole duration ─▶ take it
         └▶ mine, free or released ─▶ write it ─▶ lead until `write_until`; write it again every few seconds

Nobody's wall clock is believed. `renewTime` is for people: a record has expired when it has not *changed* for its
duration, measured from when this process first saw it so. A leader counts from before it sent its write, the others
from after they saw it, so the leader always stops first:

    leader:   sent ──── renew deadline ──── write timeout ──── margin ──┐
    others:        seen ─────────────── lease duration ─────────────────┴──▶ take over

Every write of the Lease names the resourceVersion that it replaces, so of two that want it one gets a Conflict. What
is lost or refused is never guessed about: the replica looks again before it does anything else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

# A record that somebody edited by hand must not lock everybody out for a day.
LONGEST_BELIEVED_SECONDS = 60.0
# By client-go's convention, what a leader leaves behind that goes on purpose: no holder, one second.
RELEASED_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """How long everything may take. Raises ValueError for times with which two could write at once."""

    lease_duration_seconds: int = 15
    renew_deadline_seconds: float = 10.0  # a leader that could not renew for so long begins no write
    retry_seconds: float = 2.0  # between two renewals, and between two looks
    retry_after_failure_seconds: float = 1.0
    request_timeout_seconds: float = 3.0  # of a request about the Lease
    margin_seconds: float = 1.0  # for clocks that run at different speeds: 1 in 15

    @property
    def write_timeout_seconds(self) -> float:
        """What a write has that begins at the last moment; an earlier one has more."""
        return self.lease_duration_seconds - self.renew_deadline_seconds - self.margin_seconds

    def __post_init__(self) -> None:
        one_try = self.request_timeout_seconds + self.retry_after_failure_seconds
        if self.margin_seconds <= 0 or self.write_timeout_seconds < 1:
            raise ValueError("the lease must outlast the renew deadline, a write of a second and the margin")
        if self.renew_deadline_seconds < self.retry_seconds + 2 * one_try:
            raise ValueError("the renew deadline must leave time for two tries")


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """`spec` of a coordination.k8s.io/v1 Lease. The times are RFC 3339 text, for people."""

    holder: str
    duration_seconds: float
    acquire_time: str = ""
    renew_time: str = ""
    transitions: int = 0

    @property
    def released(self) -> bool:
        """Given up by its holder. Without that mark an empty holder is somebody's edit, and the old one may write."""
        return not self.holder and self.duration_seconds <= RELEASED_SECONDS


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A record as the API server has it."""

    record: LeaseRecord
    version: str  # resourceVersion


@dataclass(frozen=True, slots=True)
class Wait:
    until: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read the Lease."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write the Lease over this version of it; None: create it."""

    record: LeaseRecord
    version: str | None


Step = Wait | Read | Write


@dataclass
class Election:
    """One replica's view. All times are seconds of one steady clock, given by the caller."""

    identity: str  # unique to this process: what it wrote before a restart was somebody else's
    timing: Timing = field(default_factory=Timing)
    jitter: random.Random = field(default_factory=random.Random)
    term: int = 0  # how often this replica began to lead
    write_until: float = float("-inf")
    _seen: ObservedLease | None = None
    _current: bool = False  # is _seen what the server has, as far as we know?
    _free_at: float | None = None  # from when on it may be taken; None: nothing was ever seen
    _next_at: float = float("-inf")  # of the next renewal, look or retry

    def leading(self, now: float) -> bool:
        return now < self.write_until

    @property
    def over_by(self) -> float:
        """When a leader's last write must be over."""
        return self.write_until + self.timing.write_timeout_seconds

    def free_now(self, now: float) -> bool:
        """Is it known that the Lease may be taken?"""
        return self._current and self._free(now)

    def next(self, now: float, wall_time: str) -> Step:
        """What to do now."""
        mine = self._seen is not None and self._seen.record.holder == self.identity
        if self._current and mine:
            return Wait(self._next_at) if self.leading(now) and now < self._next_at else self._renewal(wall_time)
        if self._current and self._free(now):
            return self._taking(wall_time)
        if now >= self._next_at:
            return Read()
        return Wait(min(self._next_at, self._free_at) if self._current and self._free_at else self._next_at)

    def record_read(self, seen: ObservedLease | None, now: float) -> None:
        """The answer to a look: the Lease, or that there is none."""
        if self._free_at is None or (seen is not None and (self._seen is None or seen.version != self._seen.version)):
            held = seen is not None and not seen.record.released
            self._free_at = now + (self._believed_seconds(seen) if held else 0.0)
        # A Lease that somebody deleted is not free before the one that we knew has run out: its holder may write on.
        mine = seen is not None and seen.record.holder == self.identity
        if seen is not None and not mine:
            self.write_until = float("-inf")
        self._seen, self._current = seen, True
        self._next_at = now if mine else now + self._pause()

    def record_write(self, seen: ObservedLease, sent: float, now: float) -> None:
        """Our write was answered. Leadership counts from before it was sent."""
        if self._seen is not None and seen.version == self._seen.version:
            return self.record_failure(now)  # nothing changed, so nobody can have seen a renewal
        if not self.leading(now):
            self.term += 1
        self._seen, self._current = seen, True
        self._free_at = now + self._believed_seconds(seen)
        self.write_until = sent + self.timing.renew_deadline_seconds
        self._next_at = sent + self._pause()
        return None

    def record_failure(self, now: float) -> None:
        """A request was refused, or its answer was lost: whatever happened, look before the next write."""
        self._current = False
        self._next_at = now + self.timing.retry_after_failure_seconds * self.jitter.uniform(0.5, 1.0)

    def record_conflict(self, now: float) -> None:
        """Somebody else wrote first: look at once."""
        self._current, self._next_at = False, now

    def release(self, wall_time: str) -> Write | None:
        """What to write to give the Lease up at once; None when it is not known to be ours."""
        self.write_until = float("-inf")
        if self._seen is None or not self._current or self._seen.record.holder != self.identity:
            return None
        left = replace(self._seen.record, holder="", duration_seconds=RELEASED_SECONDS, renew_time=wall_time)
        return Write(left, self._seen.version)

    def _free(self, now: float) -> bool:
        if self._seen is None and self.leading(now):
            return True  # ours, deleted by somebody
        return self._free_at is not None and now >= self._free_at

    def _renewal(self, wall_time: str) -> Write:
        assert self._seen is not None  # noqa: S101 - for the type checker
        duration = self.timing.lease_duration_seconds
        return Write(replace(self._seen.record, duration_seconds=duration, renew_time=wall_time), self._seen.version)

    def _taking(self, wall_time: str) -> Write:
        before = self._seen.record.transitions + 1 if self._seen is not None else 0
        record = LeaseRecord(self.identity, self.timing.lease_duration_seconds, wall_time, wall_time, before)
        return Write(record, None if self._seen is None else self._seen.version)

    def _believed_seconds(self, seen: ObservedLease | None) -> float:
        """A newer version may hold longer leases than ours; never less than our own."""
        told = seen.record.duration_seconds if seen is not None else 0.0
        return max(self.timing.lease_duration_seconds, min(told, LONGEST_BELIEVED_SECONDS))

    def _pause(self) -> float:
        return self.timing.retry_seconds * self.jitter.uniform(0.8, 1.0)
