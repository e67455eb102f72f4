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

    async def take(self) -> list[tuple[float, TokenOutput]]:
        """Everything that arrived since the last call, at least one token.

        Raises:
            Exception: what `fail` was given: the engine stopped, or the server gave this request up.
        """
        await self._wake.wait()
        if self._failure is not None:
            raise self._failure
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        return arrived
