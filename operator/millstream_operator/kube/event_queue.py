"""Kubernetes Events, written in the background one after another, after more urgent work.

Events are not state: the conditions say the same. So, as in client-go's broadcaster, they are kept in memory in their
order, and dropped when there are too many of them or when the process ends. A thousand LLMDeployments applied at once
get their pods sooner.
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
MAX_POLLS = 50  # after that, one Event is written even while work waits


class EventPublisher(Protocol):
    """Publishes Events."""

    async def publish(self, event: Manifest) -> None:
        """Publish an Event. Does not raise when it could not be written."""
        ...


class EventWriter:
    """Writes an Event before it returns: for Events that must precede what they announce."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def publish(self, event: Manifest) -> None:
        try:
            await self._client.create(event)
        except (ApiError, ApiUnreachable) as error:
            log.info("%s: no Event written: %s", _about(event), error)


class EventQueue:
    """Queues Events, which `run` writes. A replica that no longer leads drops the queue.

    While `busy` returns true, one Event is written every five seconds.
    """

    def __init__(
        self, client: ClusterClient, busy: Callable[[], bool] = lambda: False, most_waiting: int = MOST_WAITING
    ) -> None:
        self._writer = EventWriter(client)
        self._busy = busy
        self._waiting: deque[Manifest] = deque()
        self._most_waiting = most_waiting
        self._added = asyncio.Event()

    async def publish(self, event: Manifest) -> None:
        if len(self._waiting) >= self._most_waiting:
            log.info("%s: no Event written: %d wait already", _about(event), len(self._waiting))
            return
        self._waiting.append(event)
        self._added.set()

    async def run(self) -> None:
        """Write Events until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            while self._waiting:
                await self._wait_while_busy()
                try:
                    await self._writer.publish(self._waiting.popleft())
                except NotLeader:
                    self._waiting.clear()

    async def _wait_while_busy(self) -> None:
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
