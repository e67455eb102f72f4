"""Tokens on their way to the asyncio task of one HTTP request, which may await several generations at once."""

from __future__ import annotations

import asyncio

from millstream_runtime.engine.request import TokenOutput


class Mailbox:
    """Lives on the event loop only, so it needs no lock."""

    def __init__(self, tokens_a_wake: int = 1) -> None:
        """`tokens_a_wake`: so many come together before the task wakes. A first token and a last wake it at once."""
        self._tokens_a_wake = tokens_a_wake
        self._arrived: list[tuple[float, TokenOutput]] = []
        self._failure: Exception | None = None
        self._is_due = False  # the task has something to wake for
        self._waiting: asyncio.Future[None] | None = None  # the task, while it sleeps
        self._silent_since_seconds = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put(self, at_seconds: float, output: TokenOutput) -> None:
        """A token, and the `time.monotonic()` at which it left the engine."""
        self._arrived.append((at_seconds, output))
        if len(self._arrived) >= self._tokens_a_wake or output.finish_reason is not None or output.prefill is not None:
            self._wake()

    def fail(self, failure: Exception) -> None:
        """Nothing more will come."""
        self._failure = failure
        self._wake()

    async def take(self, silence_seconds: float | None) -> list[tuple[float, TokenOutput]]:
        """Everything that arrived since the last call; [] when nothing came for `silence_seconds`, if they are given.

        A future, and one timer for all calls, which winds itself again when it rings too early: `asyncio.wait_for`
        would make a task for every token of every stream, and a timer a call would make a queue of cancelled ones.

        Raises:
            Exception: what `fail` was given: the engine stopped, or the server gave this request up.
        """
        if not self._is_due:
            loop = asyncio.get_running_loop()
            if silence_seconds is not None:
                self._silent_since_seconds = loop.time()
                if self._timer is None:
                    self._wind(silence_seconds, silence_seconds)
            self._waiting = loop.create_future()
            await self._waiting
        if self._failure is not None:
            raise self._failure
        self._is_due = False
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Nobody takes any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wind(self, silence_seconds: float, due_in_seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(due_in_seconds, self._ring, silence_seconds)

    def _ring(self, silence_seconds: float) -> None:
        self._timer = None
        left_seconds = self._silent_since_seconds + silence_seconds - asyncio.get_running_loop().time()
        if left_seconds > 0:
            self._wind(silence_seconds, left_seconds)
        else:
            self._wake()  # the next `take` winds it again

    def _wake(self) -> None:
        self._is_due = True
        if self._waiting is not None and not self._waiting.done():  # done: woken already, or its task is cancelled
            self._waiting.set_result(None)
