"""Rows: which place among the running sequences a newcomer gets. Each row has a home in the pool (see BlockManager).

Close rows make quick decodes (one strided view covers them), so a clean row goes out lowest first. A row whose home
still holds a cached prefix goes out only when none is clean, the longest unused first: taking it overwrites the
cache. And whoever hits that very prefix gets the row back, so that its blocks lie at home again.
"""

from __future__ import annotations

import heapq


class Rows:
    """`len()` is the number of free rows."""

    def __init__(self, num_rows: int) -> None:
        self._clean = list(range(num_rows))  # a heap
        self._caching: dict[int, None] = {}  # ordered: the longest unused first

    def __len__(self) -> int:
        return len(self._clean) + len(self._caching)

    def take(self, preferred: int | None = None) -> int:
        """A free row: the preferred one if its home still caches, else the best for the others. Ask `len()` first."""
        if preferred is not None and preferred in self._caching:
            row = preferred
        elif self._clean:
            return heapq.heappop(self._clean)
        else:
            row = next(iter(self._caching))
        del self._caching[row]
        return row

    def give_back(self, row: int, *, home_is_cached: bool) -> None:
        """A sequence has left `row`."""
        if home_is_cached:
            self._caching[row] = None
        else:
            heapq.heappush(self._clean, row)
