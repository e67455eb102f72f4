"""Rows: the batch slots of running sequences. A row may have a region of the KV pool (see `block_manager`).

Clean rows are allocated lowest first. A row whose region begins with a cached prefix is allocated only when none is
clean, the least recently used first: a sequence there cannot start where the region does. A sequence that hits this
prefix gets the row again, so that no other takes the blocks behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Container


class Rows:
    """`len()` is the number of free rows."""

    def __init__(self, num_rows: int) -> None:
        self._clean = list(range(num_rows))  # a heap
        self._cached: dict[int, None] = {}  # ordered: the least recently used first

    def __len__(self) -> int:
        return len(self._clean) + len(self._cached)

    def allocate(self, preferred: int | None = None) -> int:
        """Return a free row: `preferred` if its region is cached, else the best one. There is one: see `len()`."""
        if preferred is not None and preferred in self._cached:
            row = preferred
        elif self._clean:
            return heapq.heappop(self._clean)
        else:
            row = next(iter(self._cached))
        del self._cached[row]
        return row

    def release(self, row: int, *, is_cached: bool) -> None:
        """Free `row`. `is_cached`: its region holds a cached prefix."""
        if is_cached:
            self._cached[row] = None
        else:
            heapq.heappush(self._clean, row)


def longest_run(free: Container[int], start: int, stop: int) -> int | None:
    """The first block of the longest run of free blocks from `start` up to `stop`; None where none is free."""
    best, best_length, length = None, 0, 0
    for block in range(start, stop):
        length = length + 1 if block in free else 0
        if length > best_length:
            best, best_length = block - length + 1, length
    return best
