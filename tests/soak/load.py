"""Many requests at once from one process, as a bare client would send them, and the percentiles of what they took."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], together: int) -> float:
    """Do `work` for all of them, so many at a time. Seconds it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    waiting = iter(items)

    async def run() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(together):
            group.create_task(run())
    return loop.time() - began


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed (nearest rank); 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, median, p99 and maximum, in seconds."""
    return {
        "count": len(values),
        "p50_seconds": round(percentile(values, 50), 3),
        "p99_seconds": round(percentile(values, 99), 3),
        "max_seconds": round(max(values, default=0.0), 3),
    }
