"""Which chunks of prompts one replica is believed to hold: an LRU as large as the replica's own cache.

The engine frees the blocks of an idle prompt from its end, so a prompt's first chunk outlives its last. The LRU keeps
the same order, which makes it prefix-closed: who holds a chunk holds all chunks before it.

    oldest  [ b2 b1 b0 | a3 | a2 a1 a0 ]  newest      a prompt that shares a0 to a2 came after a3
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class BelievedCache:
    """Chunks of one replica, each with the number of the decision that used it last."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity_chunks = capacity_chunks
        self._last_use: dict[int, int] = {}  # oldest first
        self._fillers = 0  # chunks whose hash is not known: other pickers' prompts, as negative keys

    def __len__(self) -> int:
        return len(self._last_use)

    def resize(self, capacity_chunks: int) -> None:
        """Follow the capacity that the replica reports."""
        self._capacity_chunks = capacity_chunks
        self._evict()

    def held_chunks(self, chunks: Sequence[int]) -> int:
        """Return how many of the first chunks it is believed to hold."""
        return bisect_left(chunks, True, key=lambda chunk: chunk not in self._last_use)

    def last_use(self, chunk: int) -> int | None:
        """Return the number of the decision that used the chunk last; None: it is not believed to be there."""
        return self._last_use.get(chunk)

    def use(self, chunks: Sequence[int], number: int) -> None:
        """Believe that all are there, and are the newest. `number`: of the decision, rising."""
        for chunk in reversed(chunks):
            self._last_use.pop(chunk, None)
            self._last_use[chunk] = number
        self._evict()

    def fill(self, num_chunks: int, number: int) -> None:
        """Make room for as many chunks that this picker does not know: what other pickers sent there."""
        for _ in range(min(num_chunks, self._capacity_chunks)):
            self._fillers -= 1
            self._last_use[self._fillers] = number
        self._evict()

    def forget_older(self, number: int) -> None:
        """Forget what was last used before this decision: a replica that evicted something evicted all older first."""
        for chunk, last_use in [*self._last_use.items()]:
            if last_use >= number:
                break
            del self._last_use[chunk]

    def clear(self) -> None:
        """Forget everything: the replica's process is a new one."""
        self._last_use.clear()

    def _evict(self) -> None:
        excess = len(self._last_use) - self._capacity_chunks
        if excess > 0:
            oldest = iter(self._last_use)
            for chunk in [next(oldest) for _ in range(excess)]:
                del self._last_use[chunk]
