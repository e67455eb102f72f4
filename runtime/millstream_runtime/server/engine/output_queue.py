"""Tokens on their way to the asyncio task of one HTTP request, which may await several generations at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from millstream_runtime.engine.request import TokenOutput

# Tokens that one `get` returns. A client that stops reading for a second leaves thousands; each costs 0.1 ms to send,
# and the event loop would serve nobody else meanwhile.
MAX_TOKENS_PER_GET = 64


class OutputQueue:
    """Used on the event loop only, so it needs no lock."""

    def __init__(self, tokens_per_wakeup: int = 1, on_generation_ended: Callable[[], None] = lambda: None) -> None:
        """`tokens_per_wakeup`: wake the task once this many have arrived. A first or last token wakes it at once.
        `on_generation_ended`: called for each generation that the engine is done with, also while the task is busy."""
        self._tokens_per_wakeup = tokens_per_wakeup
        self.generation_ended = on_generation_ended
        self._arrived: deque[tuple[float, TokenOutput]] = deque()
        self._failure: Exception | None = None
        self._is_due = False  # the task has something to wake for
        self._left_some = False  # the last `get` returned MAX_TOKENS_PER_GET of more
        self._waiting: asyncio.Future[None] | None = None  # the task, while it sleeps
        self._idle_since_seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, at_seconds: float, output: TokenOutput) -> None:
        """Add a token and the `time.monotonic()` at which it left the engine."""
        self._arrived.append((at_seconds, output))
        if (
            len(self._arrived) >= self._tokens_per_wakeup
            or output.finish_reason is not None
            or output.prefill is not None
        ):
            self.wake()

    def fail(self, failure: Exception) -> None:
        """End the queue: `get` raises `failure` from now on."""
        self._failure = failure
        self.wake()

    async def get(self, idle_seconds: float | None) -> list[tuple[float, TokenOutput]]:
        """Return what has arrived, at most MAX_TOKENS_PER_GET; [] if nothing came for `idle_seconds` (None: no limit).

        What is left comes with the next call, after other tasks have run.
        One future, and one timer for all calls, which restarts itself when it fires too early: `asyncio.wait_for`
        would make a task for every token of every stream, and one timer per call a queue of cancelled timers.

        Raises:
            Exception: what `fail` was given: the engine stopped, or the server gave this request up.
        """
        if not self._is_due:
            loop = asyncio.get_running_loop()
            if idle_seconds is not None:
                self._idle_since_seconds = loop.time()
                if self._timer is None:
                    self._start_timer(idle_seconds, idle_seconds)
            self._waiting = loop.create_future()
            await self._waiting
        elif self._left_some:
            await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        arrived = [self._arrived.popleft() for _ in range(min(len(self._arrived), MAX_TOKENS_PER_GET))]
        self._is_due = self._left_some = bool(self._arrived)
        return arrived

    def wake(self) -> None:
        """Let `get` return what has arrived, even if that is nothing."""
        self._is_due = True
        if self._waiting is not None and not self._waiting.done():  # done: woken already, or its task is cancelled
            self._waiting.set_result(None)

    def close(self) -> None:
        """Cancel the timer; there is no further `get`."""
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, idle_seconds: float, due_in_seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(due_in_seconds, self._on_timer, idle_seconds)

    def _on_timer(self, idle_seconds: float) -> None:
        self._timer = None
        left_seconds = self._idle_since_seconds + idle_seconds - asyncio.get_running_loop().time()
        if left_seconds > 0:
            self._start_timer(idle_seconds, left_seconds)
        else:
            self.wake()  # the next `get` starts it again
