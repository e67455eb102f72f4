"""Events that wait for nobody: written in the background, one after another, and never instead of work.

Events are news and not state, since the conditions say the same. So, as client-go's broadcaster does it, they are kept
in memory for a moment, in their order, and lost when there are too many of them or when the process ends. A thousand
LLMDeployments applied at once have their pods sooner for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.fence import NotLeader

log = logging.getLogger(__name__)
Manifest = dict[str, Any]
MOST_WAITING = 5000  # about 5 MB
POLL_SECONDS = 0.1
MAX_POLLS = 50  # then one Event goes out beside the work, however much there is of it


class EventPublisher(Protocol):
    """Where an Event goes."""

    async def publish(self, event: Manifest) -> None:
        """Never raises for an Event that is not written."""
        ...


class EventWriter:
    """Writes an Event before it returns: for what is to be told before the deed."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def publish(self, event: Manifest) -> None:
        try:
            await self._client.create(event)
        except (ApiError, ApiUnreachable) as error:
            log.info("%s: no Event written: %s", _about(event), error)


class EventQueue:
    """Takes an Event and returns; `run` writes them. A replica that no longer leads drops its own.

    While `busy` says so, an Event goes out only every five seconds.
    """

    def __init__(
        self, client: ClusterClient, busy: Callable[[], bool] = lambda: False, most_waiting: int = MOST_WAITING
    ) -> None:
        self._at_once = EventWriter(client)
        self._busy = busy
        self._waiting: deque[Manifest] = deque()
        self._most_waiting = most_waiting
        self._came = asyncio.Event()

    async def publish(self, event: Manifest) -> None:
        if len(self._waiting) >= self._most_waiting:
            log.info("%s: no Event written: %d wait already", _about(event), len(self._waiting))
            return
        self._waiting.append(event)
        self._came.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                await self._let_work_pass()
                try:
                    await self._at_once.publish(self._waiting.popleft())
                except NotLeader:
                    self._waiting.clear()

    async def _let_work_pass(self) -> None:
        for _ in range(MAX_POLLS):
            if not self._busy():
                return
            await asyncio.sleep(POLL_SECONDS)

    @property
    def waiting(self) -> int:
        return len(self._waiting)


def _about(event: Manifest) -> str:
    involved = event["involvedObject"]
    return f"{involved['namespace']}/{involved['name']}"
