"""Send a planned load: on time in an open loop; in a closed loop one after another in each of N clients.

Independent of HTTP: `prepare` builds what a request sends, `send` sends it and fills its record.
Preparing comes before the due time (open loop) or before the clock of the request starts (closed loop), so the client's
own work is not the server's latency. `workload` says why an open loop never waits for answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from millstream.bench.measure import RequestRecord
from millstream.bench.openai_api import Clock
from millstream.bench.workload import PlannedRequest

Prepared = TypeVar("Prepared")


class LoadGenerator(Generic[Prepared]):
    """A run in progress. `records` holds every request that was sent or is overdue, also after an interruption."""

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        prepare: Callable[[PlannedRequest], Prepared],
        send: Callable[[Prepared, RequestRecord], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._requests = requests
        self._prepare = prepare
        self._send = send
        self._clock = clock
        self.records: list[RequestRecord] = []
        self.interrupted = False

    async def run(self, concurrency: int | None, max_connections: int) -> None:
        """Run until all have ended, or until this task is cancelled (Ctrl-C); the records stay.

        Args:
            concurrency: clients of a closed loop; None for the arrival times of the plan.
            max_connections: of an open loop; a request that is due when all are taken waits, and its latency counts.
        """
        try:
            async with asyncio.TaskGroup() as group:
                if concurrency is not None:
                    waiting = iter(self._requests)
                    for _ in range(min(concurrency, len(self._requests))):
                        group.create_task(self._client(waiting))
                else:
                    await self._arrivals(group, asyncio.Semaphore(max_connections))
        except asyncio.CancelledError:
            self.interrupted = True

    async def _client(self, waiting: Iterator[PlannedRequest]) -> None:
        for request in waiting:  # shared by all clients: each takes the next one
            prepared = self._prepare(request)
            now = self._clock()
            record = RequestRecord(request.index, now, now)
            self.records.append(record)
            await self._send(prepared, record)

    async def _arrivals(self, group: asyncio.TaskGroup, slots: asyncio.Semaphore) -> None:
        async def send_with_free_slot(prepared: Prepared, record: RequestRecord) -> None:
            async with slots:
                record.sent_seconds = self._clock()
                await self._send(prepared, record)

        for request in self._requests:
            prepared = self._prepare(request)
            due = request.arrival_seconds or 0.0
            # Also when it is already due: the event loop must get to read answers between two requests.
            await asyncio.sleep(max(0.0, due - self._clock()))
            record = RequestRecord(request.index, due, self._clock())
            self.records.append(record)
            group.create_task(send_with_free_slot(prepared, record))
