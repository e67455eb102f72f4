"""The loop that asks pods when they are due, a few at a time, whatever is asked of them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Due(Protocol):
    """What is asked when the clock has come to `due`, in monotonic seconds."""

    due: float


D = TypeVar("D", bound=Due)


class AskingWhenDue(ABC, Generic[D]):
    """For use within one event loop. `clock` is monotonic seconds. `max_concurrent`: requests in flight."""

    def __init__(self, clock: Callable[[], float], max_concurrent: int) -> None:
        self._clock, self._max_concurrent = clock, max_concurrent
        self._changed = asyncio.Event()  # something may be due earlier than before

    @abstractmethod
    def _all(self) -> Iterable[D]:
        """Return what is followed."""

    @abstractmethod
    async def _ask(self, one: D) -> None:
        """Ask it, and set when it is due again."""

    async def run(self) -> None:
        """Ask pods when they are due, until cancelled."""
        while True:
            await self._until_due()
            await self.poll_due()

    async def poll_due(self) -> None:
        """Ask the pods that are due, a few at a time."""
        now = self._clock()
        due = sorted((one for one in self._all() if one.due <= now), key=lambda one: one.due)
        await asyncio.gather(*(self._ask(one) for one in due[: self._max_concurrent]))

    async def _until_due(self) -> None:
        self._changed.clear()
        due = min((one.due for one in self._all()), default=None)
        try:
            await asyncio.wait_for(self._changed.wait(), None if due is None else max(0.0, due - self._clock()))
        except TimeoutError:
            return
