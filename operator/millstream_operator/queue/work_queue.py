"""The work queue: `Schedule` on the event loop's clock, with workers that wait for it.

A replica that does not lead stands by: its queue takes nothing and hands nothing out. Whoever begins to lead adds
every key anew, so nothing is missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Generic, TypeVar

from millstream_operator.kube.fence import NotLeader
from millstream_operator.queue.schedule import Schedule

log = logging.getLogger(__name__)
Key = TypeVar("Key")
SHORTEST_REQUEUE_SECONDS = 0.05
# For so long at most, what can wait lets pass what cannot. Where nothing else is due, it is worked on at once.
PATIENCE_SECONDS = 60.0


class RetryLater(Exception):
    """Raised by work that cannot be finished yet. Not logged as an error; retried with backoff."""

    def __init__(self, message: str, at_least_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.at_least_seconds = at_least_seconds


class RequeueAfter(RetryLater):
    """Raised by work that did all it can and waits for the world: somebody else's object, a Job, a claim.

    No failure: it comes back after the time it names, however often, and a real failure later begins at the first
    backoff. Otherwise a conflict that nobody resolves would slow down everything else about its object.
    """

    def __init__(self, message: str, after_seconds: float) -> None:
        super().__init__(message, max(after_seconds, SHORTEST_REQUEUE_SECONDS))


class Result(StrEnum):
    """How a piece of work ended."""

    DONE = "done"
    RETRY = "retry"  # not finished yet; comes back
    ERROR = "error"  # a bug; comes back
    NOT_LEADER = "not_leader"  # somebody else will do it


class WorkQueue(Generic[Key]):
    """De-duplicating and delaying; one worker a key. For use within one event loop.

    `observe` is told how each piece of work ended, and its seconds.
    """

    def __init__(
        self,
        schedule: Schedule[Key] | None = None,
        observe: Callable[[Result, float], None] = lambda _result, _seconds: None,
    ) -> None:
        self.schedule: Schedule[Key] = schedule if schedule is not None else Schedule()
        self._observe = observe
        self._standing_by = False
        self._changed = asyncio.Event()

    def add(self, key: Key, after_seconds: float = 0.0, *, can_wait: bool = False) -> None:
        """Have the key worked on, behind what cannot wait if it can; does nothing while standing by."""
        if not self._standing_by:
            self.schedule.add(key, self._now() + after_seconds, PATIENCE_SECONDS if can_wait else 0.0)
            self._changed.set()

    def stand_by(self) -> None:
        """Forget what waits and take nothing. What is being worked on goes on, as far as the fence lets it."""
        self._standing_by = True
        self.schedule.clear()

    def resume(self) -> None:
        """Take keys again."""
        self._standing_by = False

    async def run(self, work: Callable[[Key], Awaitable[None]], workers: int) -> None:
        """Work for ever with so many workers. An exception of `work` is a retry, never the end."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._worker(work))

    def count(self) -> dict[str, int]:
        """Keys by state: due, delayed, running."""
        return self.schedule.count(self._now())

    def has_urgent(self) -> bool:
        """Does a key that cannot wait wait for a worker, and would be the next?"""
        return self.schedule.next_is_urgent(self._now())

    def oldest_due_seconds(self) -> float:
        return self.schedule.oldest_due_seconds(self._now())

    def longest_running_seconds(self) -> float:
        return self.schedule.longest_running_seconds(self._now())

    async def _worker(self, work: Callable[[Key], Awaitable[None]]) -> None:
        while True:
            key = await self._next()
            began, result, at_least_seconds = self._now(), Result.ERROR, 0.0
            requeue_seconds = None
            try:
                await work(key)
                result = Result.DONE
            except RequeueAfter as reason:
                result, requeue_seconds = Result.RETRY, reason.at_least_seconds
                log.info("%s: requeued after %.0f s: %s", key, requeue_seconds, reason)
            except RetryLater as reason:
                result, at_least_seconds = Result.RETRY, reason.at_least_seconds
                log.info("%s: trying again: %s", key, reason)
            except NotLeader as reason:
                result = Result.NOT_LEADER
                log.info("%s: left to whoever leads: %s", key, reason)
            except Exception:  # one object's bug must not stop the others
                log.exception("%s: failed", key)
            finally:
                failed = result in (Result.RETRY, Result.ERROR) and requeue_seconds is None
                failed = failed and not self._standing_by
                self.schedule.done(
                    key, self._now(), failed=failed, at_least=at_least_seconds, patience=PATIENCE_SECONDS
                )
                if requeue_seconds is not None:
                    self.add(key, requeue_seconds, can_wait=True)
                self._observe(result, self._now() - began)
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
