"""The work queue: `Schedule` on the event loop's clock, with workers that wait for it.

A replica that does not lead stands by: its queue takes and hands out no keys. A new leader adds every key again, so
nothing is missed.
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
# The longest time for which a key that can wait is passed by others. Where no other is due, it does not wait.
PATIENCE_SECONDS = 60.0


class RetryLater(Exception):
    """Raised by work that cannot be finished yet. Not logged as an error; retried with backoff."""

    def __init__(self, message: str, at_least_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.at_least_seconds = at_least_seconds


class RequeueAfter(RetryLater):
    """Raised by work that did all it can and waits for something else: another owner's object, a Job, a claim.

    Not a failure: the key comes back after this time, however often, and a real failure later begins at the first
    backoff. Otherwise a conflict that is not resolved would slow down everything else about its object.
    """

    def __init__(self, message: str, after_seconds: float) -> None:
        super().__init__(message, max(after_seconds, SHORTEST_REQUEUE_SECONDS))


class Result(StrEnum):
    """How a piece of work ended."""

    DONE = "done"
    RETRY = "retry"  # not finished yet; comes back
    ERROR = "error"  # a bug; comes back
    NOT_LEADER = "not_leader"  # the leader will do it


class WorkQueue(Generic[Key]):
    """De-duplicates and delays keys; one worker per key. For use within one event loop.

    `observe` is called with how each piece of work ended, and its seconds.
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
        """Add a key, behind those that cannot wait if `can_wait`. Does nothing while standing by."""
        if not self._standing_by:
            self.schedule.add(key, self._now() + after_seconds, PATIENCE_SECONDS if can_wait else 0.0)
            self._changed.set()

    def stand_by(self) -> None:
        """Forget waiting keys and take none. Running work continues, as far as the fence allows."""
        self._standing_by = True
        self.schedule.clear()

    def resume(self) -> None:
        """Take keys again."""
        self._standing_by = False

    async def run(self, work: Callable[[Key], Awaitable[None]], workers: int) -> None:
        """Run `workers` workers until cancelled. An exception of `work` leads to a retry and never ends a worker."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._worker(work))

    def count(self) -> dict[str, int]:
        """Count keys by state: due, delayed, running."""
        return self.schedule.count(self._now())

    def has_urgent(self) -> bool:
        """Return whether the next key is one that cannot wait."""
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
                log.info("%s: left to the leader: %s", key, reason)
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
