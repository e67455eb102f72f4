"""The work queue: `Schedule` on the event loop's clock, with workers that wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from millstream_operator.reconciling.schedule import Schedule

log = logging.getLogger(__name__)
Key = TypeVar("Key")


class RetryLater(Exception):
    """Raised by work that cannot be finished yet. Not logged as an error; retried with backoff."""

    def __init__(self, message: str, at_least_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.at_least_seconds = at_least_seconds


class WorkQueue(Generic[Key]):
    """De-duplicating and delaying; one worker a key. For use within one event loop."""

    def __init__(self, schedule: Schedule[Key] | None = None) -> None:
        self.schedule: Schedule[Key] = schedule if schedule is not None else Schedule()
        self._changed = asyncio.Event()

    def add(self, key: Key, after_seconds: float = 0.0) -> None:
        self.schedule.add(key, self._now() + after_seconds)
        self._changed.set()

    async def run(self, work: Callable[[Key], Awaitable[None]], workers: int) -> None:
        """Work for ever with so many workers. An exception of `work` is a retry, never the end."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._worker(work))

    def longest_running_seconds(self) -> float:
        return self.schedule.longest_running_seconds(self._now())

    async def _worker(self, work: Callable[[Key], Awaitable[None]]) -> None:
        while True:
            key = await self._next()
            failed, at_least_seconds = True, 0.0
            try:
                await work(key)
                failed = False
            except RetryLater as reason:
                at_least_seconds = reason.at_least_seconds
                log.info("%s: trying again: %s", key, reason)
            except Exception:  # one object's bug must not stop the others
                log.exception("%s: failed", key)
            finally:
                self.schedule.done(key, self._now(), failed=failed, at_least=at_least_seconds)
                self._changed.set()

    async def _next(self) -> Key:
        while True:
            key = self.schedule.pop(self._now())
            if key is not None:
                return key
            self._changed.clear()
            due = self.schedule.next_due()
            delay = None if due is None else max(0.0, due - self._now())
            try:
                await asyncio.wait_for(self._changed.wait(), delay)
            except TimeoutError:
                continue

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
