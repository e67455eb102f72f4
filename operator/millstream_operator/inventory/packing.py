"""Subtract promised GPUs from the free ones. Pure.

A pinned plan wants its GPUs before the scheduler has bound its pods. Until then they are subtracted from the free ones:
the largest wants first, each from the node that it fills best. The scheduler may choose another node; the sum per part
is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Part and free GPUs of a node -> how many such nodes there are.
Free = Counter[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Want:
    """`gpus` on one node, of one part. `part` None: of the part with the most GPUs left."""

    gpus: int
    part: str | None


def without_promised(free: Free, wanted: Sequence[tuple[Want, int]]) -> Free:
    """Return what is left of `free` after each want was met that many times. A want that does not fit takes nothing."""
    left = Free(free)
    named = ((want.gpus, want.part, times) for want, times in wanted if want.part is not None)
    for gpus, part, times in sorted(named, reverse=True):
        _take(left, part, gpus, times)
    of_any_part = ((want.gpus, times) for want, times in wanted if want.part is None)
    for gpus, times in sorted(of_any_part, reverse=True):
        for _ in range(times):
            if (most := _with_most_left(left, gpus)) is None:
                break
            _take(left, most, gpus, 1)
    return left


def _take(free: Free, part: str, gpus: int, times: int) -> None:
    while times:
        tightest = min((size for name, size in free if name == part and size >= gpus), default=None)
        if tightest is None:
            return
        nodes = free[part, tightest]
        # Whole nodes at once: only the last one may be filled in part.
        fits = tightest // gpus
        full = min(nodes, times // fits)
        if full:
            _move(free, part, tightest, tightest - fits * gpus, full)
            times -= full * fits
        else:
            _move(free, part, tightest, tightest - times * gpus, 1)
            times = 0


def _move(free: Free, part: str, size: int, rest: int, nodes: int) -> None:
    free[part, size] -= nodes
    if not free[part, size]:
        del free[part, size]
    if rest:
        free[part, rest] += nodes


def _with_most_left(free: Free, gpus: int) -> str | None:
    left: Counter[str] = Counter()
    for (part, size), nodes in free.items():
        left[part] += nodes * (size // gpus)
    best = max(left.items(), key=lambda item: (item[1], item[0]), default=None)
    return best[0] if best is not None and best[1] else None
