"""Two replicas on a bad network, with bad clocks and long pauses: never do both write at once.

A simulation in which only the true time is common. Each replica has a clock of its own offset and speed, may be paused
for half a minute at any moment, and speaks with one Lease through a network that delays and loses requests and answers.
What is recorded is the true time in which each write may reach the server.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from millstream_operator.leadership.election import Election, LeaseRecord, ObservedLease, Read, Timing, Wait, Write

pytestmark = pytest.mark.deep

TIMING = Timing()
LONGEST_WRITE_SECONDS = 15.0
DURATION_SECONDS = 400.0
# 3 % fast against 3 % slow: less than the margin of 1 second in 15.
SPEEDS = (0.97, 1.03)


@dataclass
class World:
    """The true time, the Lease, and what is going to happen."""

    random: random.Random
    faults: bool
    now: float = 0.0
    lease: ObservedLease | None = None
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    sequence: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (max(when, self.now), next(self.sequence), what))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, what = heapq.heappop(self.events)
            what()
        self.now = until

    def write_lease(self, record: LeaseRecord, version: str | None) -> ObservedLease | None:
        """None: a conflict."""
        if (self.lease.version if self.lease else None) != version:
            return None
        self.lease = ObservedLease(record, str(next(self.sequence)))
        return self.lease

    def delay(self) -> float:
        """Of one way: quick as a rule, now and then longer than any timeout, or for ever."""
        if not self.faults:
            return self.random.uniform(0.001, 0.25)
        return self.random.choice((0.01, 0.05, 0.5, self.random.uniform(0, 6), float("inf")))

    def pause(self) -> float:
        return self.random.uniform(5, 30) if self.faults and self.random.random() < 0.02 else 0.0


class Replica:
    """One process. `windows` holds, for each of its writes, from when to when the server may have carried it out."""

    def __init__(self, world: World, name: str, election: type[Election] = Election) -> None:
        self.world, self.name, self.alive = world, name, True
        self.election = election(name, TIMING, random.Random(world.random.random()))
        self.offset, self.speed = world.random.uniform(-1e6, 1e6), world.random.uniform(*SPEEDS)
        self.windows: list[tuple[float, float]] = []
        world.at(world.now, self.wake)
        world.at(world.now, self.write_something)

    def clock(self) -> float:
        return self.offset + self.speed * self.world.now

    def after(self, own_seconds: float, what: Callable[[], None]) -> None:
        """So long by this replica's clock, or later when the process is paused."""
        self.world.at(self.world.now + own_seconds / self.speed + self.world.pause(), what)

    def wake(self) -> None:
        if not self.alive:
            return
        now = self.clock()
        step = self.election.next(now, str(next(self.world.sequence)))
        if isinstance(step, Wait):
            self.after(max(step.until - now, 0.0), self.wake)
        else:
            self.ask(step, now)

    def ask(self, step: Read | Write, sent: float) -> None:
        done: list[bool] = []

        def once(what: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                if not done and self.alive:
                    done.append(True)
                    what()
                    self.wake()

            return run

        def arrive() -> None:  # at the server, also long after the client gave up
            if isinstance(step, Read):
                seen = self.world.lease
                answer = lambda: self.election.record_read(seen, self.clock())  # noqa: E731
            elif (written := self.world.write_lease(step.record, step.version)) is None:
                answer = lambda: self.election.record_conflict(self.clock())  # noqa: E731
            else:
                answer = lambda: self.election.record_write(written, sent, self.clock())  # noqa: E731
            back = self.world.delay()
            if back < float("inf"):
                self.world.at(self.world.now + back + self.world.pause(), once(answer))

        there = self.world.delay()
        if there < float("inf"):
            self.world.at(self.world.now + there, arrive)
        self.after(TIMING.request_timeout_seconds, once(lambda: self.election.record_failure(self.clock())))

    def write_something(self) -> None:
        """What the fence allows: to begin now, and to take as long as is left."""
        if not self.alive:
            return
        now = self.clock()
        if self.election.leading(now):
            seconds = min(LONGEST_WRITE_SECONDS, self.election.over_by - now) / self.speed
            self.windows.append((self.world.now, self.world.now + seconds * self.world.random.random()))
        self.after(self.world.random.uniform(0.0, 1.0), self.write_something)


def simulate(seed: int, election: type[Election] = Election) -> list[Replica]:
    world = World(random.Random(seed), faults=True)
    replicas = [Replica(world, name, election) for name in ("a", "b", "c")[: 2 + seed % 2]]
    world.run(DURATION_SECONDS)
    return replicas


def overlaps(replicas: list[Replica]) -> list[str]:
    """Writes of different replicas that may have been carried out at the same time."""
    windows = sorted((begin, end, one.name) for one in replicas for begin, end in one.windows)
    found, last_end = [], {one.name: float("-inf") for one in replicas}
    for begin, end, name in windows:
        found += [f"{name} at {begin:.2f}, {o} until {t:.2f}" for o, t in last_end.items() if o != name and t > begin]
        last_end[name] = max(last_end[name], end)
    return found


@pytest.mark.parametrize("chunk", range(10))
def test_two_replicas_never_write_at_once(chunk: int) -> None:
    leaders = set()
    for seed in range(chunk * 30, chunk * 30 + 30):
        replicas = simulate(seed)
        assert not overlaps(replicas), f"seed {seed}"
        leaders |= {one.name for one in replicas if one.windows}
    assert {"a", "b"} <= leaders, "leadership moved about: something was put to the test"


class CountsFromTheAnswer(Election):
    """The mistake of counting a renewal from when its answer came."""

    def record_write(self, seen: ObservedLease, sent: float, now: float) -> None:
        super().record_write(seen, now, now)


class TakesOverEarly(Election):
    """The mistake of letting a record expire too early."""

    def _free(self, now: float) -> bool:
        return self._free_at is not None and now >= self._free_at - 0.5 * TIMING.lease_duration_seconds


class GoesOnAfterAFailure(Election):
    """The mistake of leading on while renewals fail."""

    def record_failure(self, now: float) -> None:
        super().record_failure(now)
        if self.leading(now):
            self.write_until = now + self.timing.renew_deadline_seconds


@pytest.mark.parametrize("mistake", [CountsFromTheAnswer, TakesOverEarly, GoesOnAfterAFailure])
def test_the_simulation_finds_a_mistake(mistake: type[Election]) -> None:
    """Otherwise the test above would prove nothing."""
    assert any(overlaps(simulate(seed, mistake)) for seed in range(100))


@pytest.mark.parametrize("seed", range(50))
def test_a_killed_leader_is_replaced_within_twenty_seconds(seed: int) -> None:
    """On a network that works: killed at any moment, without a word."""
    world = World(random.Random(seed), faults=False)
    replicas = {name: Replica(world, name) for name in ("a", "b")}
    killed_at = 10.0 + world.random.uniform(0, 5)
    world.run(killed_at)
    (leader,) = [one for one in replicas.values() if one.election.leading(one.clock())]
    leader.alive = False
    world.run(killed_at + 20.0)
    (other,) = [one for one in replicas.values() if one is not leader]
    assert other.election.leading(other.clock())
    assert other.windows
    assert not overlaps(list(replicas.values()))


@pytest.mark.parametrize("seed", range(20))
def test_after_any_trouble_somebody_leads_again(seed: int) -> None:
    world = World(random.Random(seed), faults=True)
    replicas = [Replica(world, name) for name in ("a", "b")]
    world.run(200.0)
    world.faults = False
    world.run(200.0 + 30.0 + 30.0)  # the longest pause, and then a takeover
    assert sum(one.election.leading(one.clock()) for one in replicas) == 1


@pytest.mark.parametrize("seed", range(10))
def test_without_trouble_the_first_leader_stays(seed: int) -> None:
    world = World(random.Random(seed), faults=False)
    replicas = [Replica(world, name) for name in ("a", "b")]
    world.run(DURATION_SECONDS)
    assert sum(bool(one.windows) for one in replicas) == 1
    assert max(one.election.term for one in replicas) == 1
