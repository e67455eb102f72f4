"""When each key is worked on next: the pure half of the work queue.

The rules are those of client-go's rate-limited work queue. A key is handed out to one worker at a time; added again
meanwhile, it comes back when that worker is done. Added twice while waiting, it is due at the earlier time. After a
failure it waits twice as long as before, with jitter, so that a thousand failing keys do not come back together.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")

FIRST_RETRY_SECONDS = 0.25
LONGEST_RETRY_SECONDS = 300.0
LONGEST_DOUBLINGS = 20


@dataclass
class Schedule(Generic[Key]):
    """Times are seconds of any monotonic clock, given by the caller."""

    jitter: random.Random = field(default_factory=random.Random)
    _due: dict[Key, float] = field(default_factory=dict)  # waiting
    _heap: list[tuple[float, int, Key]] = field(default_factory=list)  # with outdated entries, skipped when met
    _running: dict[Key, float] = field(default_factory=dict)  # since when
    _again: dict[Key, float] = field(default_factory=dict)  # added while running
    _failures: dict[Key, int] = field(default_factory=dict)
    _sequence: int = 0

    def add(self, key: Key, due: float) -> None:
        """Have `key` worked on at `due`, or earlier where it already was to be."""
        waiting = self._again if key in self._running else self._due
        if key in waiting and waiting[key] <= due:
            return
        waiting[key] = due
        if waiting is self._due:
            self._sequence += 1
            heapq.heappush(self._heap, (due, self._sequence, key))

    def pop(self, now: float) -> Key | None:
        """The key that has been due for longest, marked as running; None when none is due."""
        self._drop_outdated()
        if not self._heap or self._heap[0][0] > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        self._running[key] = now
        return key

    def done(self, key: Key, now: float, *, failed: bool, at_least: float = 0.0) -> None:
        """The worker has finished `key`. Failed, it comes back after its backoff, or `at_least` seconds."""
        del self._running[key]
        again = self._again.pop(key, None)
        if failed:
            self._failures[key] = self._failures.get(key, 0) + 1
            self.add(key, now + max(at_least, self.backoff(self._failures[key])))
        else:
            self._failures.pop(key, None)
        if again is not None:
            self.add(key, max(again, now))

    def backoff(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row: between half and all of the doubled time."""
        longest: float = FIRST_RETRY_SECONDS * 2 ** min(failures - 1, LONGEST_DOUBLINGS)
        return min(longest, LONGEST_RETRY_SECONDS) * self.jitter.uniform(0.5, 1.0)

    def clear(self) -> None:
        """Forget what waits, and every failure. What is running finishes and does not come back."""
        for waiting in (self._due, self._heap, self._again, self._failures):
            waiting.clear()

    def next_due(self) -> float | None:
        self._drop_outdated()
        return self._heap[0][0] if self._heap else None

    def longest_running_seconds(self, now: float) -> float:
        return max((now - since for since in self._running.values()), default=0.0)

    def count(self, now: float) -> dict[str, int]:
        """Keys that are due and wait for a worker, that wait for their time, and that are worked on."""
        due = sum(time <= now for time in self._due.values())
        return {"due": due, "delayed": len(self._due) - due, "running": len(self._running)}

    def oldest_due_seconds(self, now: float) -> float:
        """How long the key that has waited longest for a worker has been due."""
        return max(0.0, now - min(self._due.values(), default=now))

    def __len__(self) -> int:
        return len(self._due) + len(self._running)

    def _drop_outdated(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
