"""When each key is worked on next: the pure half of the work queue.

The rules are those of client-go's rate-limited work queue. A key is handed out to one worker at a time; added again
meanwhile, it comes back when that worker is done. Added twice while waiting, it is due at the earlier time. After a
failure it waits twice as long as before, with jitter, so that a thousand failing keys do not come back together.

In addition, a key may have *patience*: keys that become due up to that many seconds later go first.
(controller-runtime has a priority queue for the same purpose. Patience is a priority that ends, so no key starves.)
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key")

FIRST_RETRY_SECONDS = 0.25
LONGEST_RETRY_SECONDS = 300.0
LONGEST_DOUBLINGS = 20


class _Place(NamedTuple):
    """The place of a waiting key: when it is due, and its rank (a time) among the keys that are due."""

    due: float
    rank: float

    @property
    def is_urgent(self) -> bool:
        return self.rank <= self.due

    def sooner(self, other: _Place) -> _Place:
        return _Place(min(self.due, other.due), min(self.rank, other.rank))


@dataclass
class Schedule(Generic[Key]):
    """Times are seconds of any monotonic clock, given by the caller.

    Both heaps may hold outdated entries, which are skipped: a key's place is the one in `_waiting`.
    """

    jitter: random.Random = field(default_factory=random.Random)
    _waiting: dict[Key, _Place] = field(default_factory=dict)
    _later: list[tuple[float, int, _Place, Key]] = field(default_factory=list)  # heap by due
    _ready: list[tuple[float, int, _Place, Key]] = field(default_factory=list)  # heap by rank, of those that are due
    _running: dict[Key, float] = field(default_factory=dict)  # since when
    _again: dict[Key, _Place] = field(default_factory=dict)  # added while running
    _failures: dict[Key, int] = field(default_factory=dict)
    _sequence: int = 0

    def add(self, key: Key, due: float, patience: float = 0.0) -> None:
        """Schedule `key` at `due`, or keep an earlier time that it has; among due keys, rank it `patience` later."""
        place = _Place(due, due + patience)
        waiting = self._again if key in self._running else self._waiting
        if (known := waiting.get(key)) is not None and (place := known.sooner(place)) == known:
            return
        waiting[key] = place
        if waiting is self._waiting:
            self._sequence += 1
            heapq.heappush(self._later, (place.due, self._sequence, place, key))

    def pop(self, now: float) -> Key | None:
        """Return the first due key by rank, marked as running; None when none is due."""
        self._make_ready(now)
        if not self._ready:
            return None
        key = heapq.heappop(self._ready)[3]
        del self._waiting[key]
        self._running[key] = now
        return key

    def next_is_urgent(self, now: float) -> bool:
        """Return whether the next key has no patience."""
        self._make_ready(now)
        return bool(self._ready) and self._ready[0][2].is_urgent

    def done(self, key: Key, now: float, *, failed: bool, at_least: float = 0.0, patience: float = 0.0) -> None:
        """Record that `key` is finished. A failed key comes back, with patience, after its backoff or `at_least`."""
        del self._running[key]
        again = self._again.pop(key, None)
        if failed:
            self._failures[key] = self._failures.get(key, 0) + 1
            self.add(key, now + max(at_least, self.backoff(self._failures[key])), patience)
        else:
            self._failures.pop(key, None)
        if again is not None:
            self.add(key, max(again.due, now), again.rank - again.due)

    def backoff(self, failures: int) -> float:
        """Return the seconds to wait after `failures` in a row: between half and all of the doubled time."""
        longest: float = FIRST_RETRY_SECONDS * 2 ** min(failures - 1, LONGEST_DOUBLINGS)
        return min(longest, LONGEST_RETRY_SECONDS) * self.jitter.uniform(0.5, 1.0)

    def clear(self) -> None:
        """Forget waiting keys and failures. Running keys finish and do not come back."""
        for waiting in (self._waiting, self._later, self._ready, self._again, self._failures):
            waiting.clear()

    def next_due(self) -> float | None:
        """Return when the next key is due: a time in the past where one is due now."""
        for heap in (self._ready, self._later):
            self._drop_outdated(heap)
            if heap:
                return heap[0][2].due
        return None

    def longest_running_seconds(self, now: float) -> float:
        return max((now - since for since in self._running.values()), default=0.0)

    def count(self, now: float) -> dict[str, int]:
        """Count the keys that wait for a worker (due), that wait for their time (delayed), and that are running."""
        due = sum(place.due <= now for place in self._waiting.values())
        return {"due": due, "delayed": len(self._waiting) - due, "running": len(self._running)}

    def oldest_due_seconds(self, now: float) -> float:
        """Return how long the key that has waited longest for a worker has been due."""
        return max(0.0, now - min((place.due for place in self._waiting.values()), default=now))

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def _make_ready(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            _, sequence, place, key = heapq.heappop(self._later)
            heapq.heappush(self._ready, (place.rank, sequence, place, key))
        self._drop_outdated(self._ready)

    def _drop_outdated(self, heap: list[tuple[float, int, _Place, Key]]) -> None:
        while heap and self._waiting.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
