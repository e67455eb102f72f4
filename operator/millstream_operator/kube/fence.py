"""The fence: whether this process may write now. Checked before every write, and again just before its bytes are sent.

A leader must stop by itself: when it is cut off from the API server, it cannot learn that another has taken over. So
the right to write ends at a time on this process's own clock, and each write must also be *over* before another
replica could begin. This is the lease of Gray and Cheriton (Leases, SOSP 1989) with the part that client-go's elector
leaves out: its documentation says that it "does not guarantee that only one client is acting as a leader (a.k.a.
fencing)".

    lease written ──────── write_until ──────── over_by ──── another may take over ─▶
                  may begin a write    may finish one      (Timing in leadership/election.py)

One case remains: a request whose last byte is on the wire when the client gives up. The query's `timeout=` limits the
API server, counted from the request's arrival; a network that holds a whole request back for seconds and then delivers
it could still make it late. Only the storage could refuse that one.
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
    """This process may not write now. Not a failure: the leader does the work."""


def steady_seconds() -> float:
    """Return seconds of a monotonic clock; where the system has one, of a clock that also runs during suspend."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(slots=True)
class Permit:
    """One write: how long it may take, and, when it is over, whether the server answered it."""

    seconds: float
    answered: bool = False


class Fence:
    """Open until a time that each renewal extends. A new one stays open: for an operator without leader election."""

    def __init__(self, clock: Callable[[], float] = steady_seconds) -> None:
        self._clock = clock
        self._write_until = self._over_by = math.inf
        self._in_flight = 0
        self._unanswered_until = -math.inf

    def open(self, write_until: float, over_by: float) -> None:
        """Allow writes to begin before `write_until`; they must be over at `over_by`. Seconds of the clock."""
        self._write_until, self._over_by = write_until, over_by

    def close(self) -> None:
        """Refuse further writes. A write in flight keeps its own limit."""
        self._write_until = -math.inf

    def check(self) -> None:
        """Raise NotLeader when a write may not begin now."""
        if self._clock() >= self._write_until:
            raise NotLeader("this replica does not lead")

    @contextmanager
    def write(self, longest_seconds: float) -> Iterator[Permit]:
        """Enclose a write, which may take at most `Permit.seconds`. Raises NotLeader when it may not begin."""
        self.check()
        began = self._clock()
        permit = Permit(min(longest_seconds, self._over_by - began))
        self._in_flight += 1
        try:
            yield permit
        except NotLeader:
            permit.answered = True  # refused before its body was sent, so it has no effect
            raise
        finally:
            self._in_flight -= 1
            if not permit.answered:  # the server may still work on it, up to its time limit
                self._unanswered_until = max(self._unanswered_until, self._clock() + permit.seconds)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def quiet(self) -> bool:
        """Return whether every write is over, here and on the server."""
        return not self._in_flight and self._clock() >= self._unanswered_until

    async def wait_idle(self, longest_seconds: float) -> bool:
        """Wait until no write is in flight here, at most `longest_seconds`. Return whether none is."""
        return await self._wait(lambda: not self._in_flight, longest_seconds)

    async def wait_quiet(self, longest_seconds: float) -> bool:
        """Wait until quiet, at most `longest_seconds`. Return whether it is."""
        return await self._wait(self.quiet, longest_seconds)

    async def _wait(self, holds: Callable[[], bool], longest_seconds: float) -> bool:
        give_up = self._clock() + longest_seconds
        while not holds():
            if self._clock() >= give_up:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True
