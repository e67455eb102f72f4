"""Leader election, the pure half: what one replica concludes from the Lease records that it read, on its own clock.

    read ─▶ held by another ─▶ wait: until it changes, or has not changed for its whole duration ─▶ acquire it
         └▶ mine, free or released ─▶ write it ─▶ lead until `write_until`; write it again every few seconds

No wall clock is used. `renewTime` is for people: a record has expired when it has not *changed* for its duration,
measured from when this process first read it. A leader counts from before it sent its write, the others from after
they read it, so the leader always stops first:

    leader:   sent ──── renew deadline ──── write timeout ──── margin ──┐
    others:        seen ─────────────── lease duration ─────────────────┴──▶ take over

Every write of the Lease names the resourceVersion that it replaces, so of two replicas that want it one gets a
Conflict. After a lost or refused request, the replica reads the Lease before it does anything else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

# A record that was edited by hand must not lock all replicas out for a day.
LONGEST_RESPECTED_SECONDS = 60.0
# By client-go's convention, a leader that releases the Lease leaves no holder and a duration of one second.
RELEASED_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of an election. Raises ValueError for times with which two replicas could write at once."""

    lease_duration_seconds: int = 15
    renew_deadline_seconds: float = 10.0  # a leader that has not renewed for this long begins no write
    retry_seconds: float = 2.0  # between two renewals, and between two reads
    retry_after_failure_seconds: float = 1.0
    request_timeout_seconds: float = 3.0  # of a request about the Lease
    margin_seconds: float = 1.0  # for clocks that run at different speeds: 1 in 15

    @property
    def write_timeout_seconds(self) -> float:
        """The time limit of a write that begins at the last moment; an earlier one has more."""
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
        """Whether its holder released it. An empty holder alone may be an edit, and the old leader may still write."""
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

    identity: str  # unique to this process: a restarted one is another replica
    timing: Timing = field(default_factory=Timing)
    jitter: random.Random = field(default_factory=random.Random)
    term: int = 0  # how many times this replica became leader
    write_until: float = float("-inf")
    _seen: ObservedLease | None = None
    _current: bool = False  # whether _seen is what the server has, as far as we know
    _free_at: float | None = None  # from when on it may be taken; None: nothing was ever seen
    _next_at: float = float("-inf")  # of the next renewal, read or retry

    def leading(self, now: float) -> bool:
        return now < self.write_until

    @property
    def over_by(self) -> float:
        """The time at which a leader's last write must be over."""
        return self.write_until + self.timing.write_timeout_seconds

    def free_now(self, now: float) -> bool:
        """Return whether the Lease is known to be free."""
        return self._current and self._free(now)

    def next(self, now: float, wall_time: str) -> Step:
        """Return what to do now."""
        mine = self._seen is not None and self._seen.record.holder == self.identity
        if self._current and mine:
            return Wait(self._next_at) if self.leading(now) and now < self._next_at else self._renewal(wall_time)
        if self._current and self._free(now):
            return self._acquisition(wall_time)
        if now >= self._next_at:
            return Read()
        return Wait(min(self._next_at, self._free_at) if self._current and self._free_at else self._next_at)

    def record_read(self, seen: ObservedLease | None, now: float) -> None:
        """Record the answer to a read: the Lease, or None when there is none."""
        if self._free_at is None or (seen is not None and (self._seen is None or seen.version != self._seen.version)):
            held = seen is not None and not seen.record.released
            self._free_at = now + (self._respected_seconds(seen) if held else 0.0)
        # A deleted Lease is not free before the one that we knew has run out: its holder may still write.
        mine = seen is not None and seen.record.holder == self.identity
        if seen is not None and not mine:
            self.write_until = float("-inf")
        self._seen, self._current = seen, True
        self._next_at = now if mine else now + self._pause()

    def record_write(self, seen: ObservedLease, sent: float, now: float) -> None:
        """Record the answer to our write. Leadership counts from before it was sent."""
        if self._seen is not None and seen.version == self._seen.version:
            return self.record_failure(now)  # nothing changed, so no other replica can have seen a renewal
        if not self.leading(now):
            self.term += 1
        self._seen, self._current = seen, True
        self._free_at = now + self._respected_seconds(seen)
        self.write_until = sent + self.timing.renew_deadline_seconds
        self._next_at = sent + self._pause()
        return None

    def record_failure(self, now: float) -> None:
        """Record a request that was refused or not answered: read before the next write."""
        self._current = False
        self._next_at = now + self.timing.retry_after_failure_seconds * self.jitter.uniform(0.5, 1.0)

    def record_conflict(self, now: float) -> None:
        """Record that another replica wrote first: read at once."""
        self._current, self._next_at = False, now

    def release(self, wall_time: str) -> Write | None:
        """Return the write that releases the Lease; None when it is not known to be ours."""
        self.write_until = float("-inf")
        if self._seen is None or not self._current or self._seen.record.holder != self.identity:
            return None
        left = replace(self._seen.record, holder="", duration_seconds=RELEASED_SECONDS, renew_time=wall_time)
        return Write(left, self._seen.version)

    def _free(self, now: float) -> bool:
        if self._seen is None and self.leading(now):
            return True  # it was ours, and was deleted
        return self._free_at is not None and now >= self._free_at

    def _renewal(self, wall_time: str) -> Write:
        assert self._seen is not None  # noqa: S101 - for the type checker
        duration = self.timing.lease_duration_seconds
        return Write(replace(self._seen.record, duration_seconds=duration, renew_time=wall_time), self._seen.version)

    def _acquisition(self, wall_time: str) -> Write:
        before = self._seen.record.transitions + 1 if self._seen is not None else 0
        record = LeaseRecord(self.identity, self.timing.lease_duration_seconds, wall_time, wall_time, before)
        return Write(record, None if self._seen is None else self._seen.version)

    def _respected_seconds(self, seen: ObservedLease | None) -> float:
        """Return how long a record is respected: a newer version may use longer leases; never less than our own."""
        wanted = seen.record.duration_seconds if seen is not None else 0.0
        return max(self.timing.lease_duration_seconds, min(wanted, LONGEST_RESPECTED_SECONDS))

    def _pause(self) -> float:
        return self.timing.retry_seconds * self.jitter.uniform(0.8, 1.0)
