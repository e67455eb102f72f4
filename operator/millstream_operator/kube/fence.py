"""May this process write now? Asked before every write, and again at the moment when its bytes leave.

A leader must stop by itself: when it is cut off, nobody can tell it that another has taken over. So the right to write
ends at a time that this process reads from its own clock, and each write must also be *over* before anybody else could
begin. This is the lease of Gray and Cheriton (Leases, SOSP 1989) with the part that client-go's elector leaves out: its
documentation says that it "does not guarantee that only one client is acting as a leader (a.k.a. fencing)".

    lease written ──────── write_until ──────── over_by ──── another may take over ─▶
                  may begin a write    may finish one      (Timing in leadership/election.py)

What remains: a request whose last byte is on the wire when the client gives it up. The API server is told how long it
may take (`timeout=` of the query), which counts from when it arrives there; a network that keeps a whole request back
for seconds and then delivers it could still bring it in late. Only the storage could refuse that one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

POLL_SECONDS = 0.05


class NotLeader(Exception):
    """This process may not write now. Not a failure: whoever leads does the work."""


def steady_seconds() -> float:
    """A clock that nobody sets. Where the system has one, it also runs while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(slots=True)
class Permit:
    """One write: how long it may take, and, when it is over, whether the server answered it."""

    seconds: float
    answered: bool = False


class Fence:
    """Open until a time, extended by each renewal. A new one is open for ever: for an operator that runs alone."""

    def __init__(self, clock: Callable[[], float] = steady_seconds) -> None:
        self._clock = clock
        self._write_until = self._over_by = math.inf
        self._in_flight = 0
        self._unanswered_until = -math.inf

    def open(self, write_until: float, over_by: float) -> None:
        """Writes may begin before `write_until` and must be over at `over_by`, in seconds of the clock."""
        self._write_until, self._over_by = write_until, over_by

    def close(self) -> None:
        """No more writes. What is under way keeps its own limit."""
        self._write_until = -math.inf

    def check(self) -> None:
        """Raises NotLeader when a write may not begin now."""
        if self._clock() >= self._write_until:
            raise NotLeader("this replica does not lead")

    @contextmanager
    def write(self, longest_seconds: float) -> Iterator[Permit]:
        """A write that takes at most `Permit.seconds`. Raises NotLeader instead when it may not begin."""
        self.check()
        began = self._clock()
        permit = Permit(min(longest_seconds, self._over_by - began))
        self._in_flight += 1
        try:
            yield permit
        except NotLeader:
            permit.answered = True  # refused before its body left: nobody can carry it out
            raise
        finally:
            self._in_flight -= 1
            if not permit.answered:  # the server may still be at it, for as long as it was told
                self._unanswered_until = max(self._unanswered_until, self._clock() + permit.seconds)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def quiet(self) -> bool:
        """Is every write over, here and on the server?"""
        return not self._in_flight and self._clock() >= self._unanswered_until

    async def wait_idle(self, longest_seconds: float) -> bool:
        """Wait until no write is under way here, or so long. True when none is."""
        return await self._wait(lambda: not self._in_flight, longest_seconds)

    async def wait_quiet(self, longest_seconds: float) -> bool:
        """Wait until quiet, or so long. True when quiet."""
        return await self._wait(self.quiet, longest_seconds)

    async def _wait(self, holds: Callable[[], bool], longest_seconds: float) -> bool:
        give_up = self._clock() + longest_seconds
        while not holds():
            if self._clock() >= give_up:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True
