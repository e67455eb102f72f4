"""Ctrl-C in the middle of a long proof: what was found so far is kept, and said to be a part."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def finished(work: Coroutine[Any, Any, None]) -> bool:
    """Await the work; False when Ctrl-C ended it. Whoever calls goes on, to clean up and to tell what there is."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            raise
        while task.cancelling():
            task.uncancel()
        return False
    return True


async def together(lanes: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them in parallel until all are done; the first that fails ends the others."""
    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(lane)
