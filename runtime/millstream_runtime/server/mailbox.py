"""Tokens on their way to the asyncio task of one HTTP request, which may await several generations at once."""

from __future__ import annotations

import asyncio

from millstream_runtime.engine.request import TokenOutput


class Mailbox:
    """Lives on the event loop only, so it needs no lock."""

    def __init__(self) -> None:
        self._arrived: list[tuple[float, TokenOutput]] = []
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    def put(self, at_seconds: float, output: TokenOutput) -> None:
        """A token, and the `time.monotonic()` at which it left the engine."""
        self._arrived.append((at_seconds, output))
        self._wake.set()

    def fail(self, failure: Exception) -> None:
        """Nothing more will come."""
        self._failure = failure
        self._wake.set()

    async def take(self, silence_seconds: float) -> list[tuple[float, TokenOutput]]:
        """Everything that arrived since the last call; [] when nothing came for `silence_seconds`.

        A timer and an event, not `asyncio.wait_for`: that would make a task for every token of every stream.

        Raises:
            Exception: what `fail` was given: the engine stopped, or the server gave this request up.
        """
        if not self._wake.is_set():
            timer = asyncio.get_running_loop().call_later(silence_seconds, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        if self._failure is not None:
            raise self._failure
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        return arrived
