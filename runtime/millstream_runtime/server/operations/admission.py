"""Admission of generations: a bounded queue that a drain closes.

    reserve(n) ─ n places ─▶ the engine ends a generation: its place is free ─▶ ... ─▶ the answer is delivered

With API keys each key has a share of the places, `capacity // keys`, which no other key can take: a request within the
share of its key is admitted although the others fill the queue. So all together may hold twice `capacity`, where keys
that stay within their shares come behind others that had filled it.

A place is free as soon as the engine is done with its generation, so a client that does not read its answer keeps
no other client out. A drain waits until the answers are delivered too. Counted on the event loop, from the moment a
request is accepted (before its prompt is tokenised), so the counts are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millstream_runtime.server.http.api_errors import ApiError, unavailable
from millstream_runtime.server.http.limits import RETRY_AFTER_SECONDS

MOST_SHARED_CAPACITY = 2  # times the capacity, where each key has its share


class Reservation:
    """The places of one request; each is given back once."""

    def __init__(self, admission: Admission, count: int, client: str) -> None:
        self._admission = admission
        self._count = count
        self._client = client
        admission.hold(client, count)

    def release_one(self) -> None:
        """The engine is done with one of the generations."""
        self._release(min(1, self._count))

    def release(self) -> None:
        """Give back what is left."""
        self._release(self._count)

    def _release(self, count: int) -> None:
        self._count -= count
        self._admission.hold(self._client, -count)


class Admission:
    """`capacity` counts running and queued generations together."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_refused = 0  # requests that found the queue full
        self.in_flight = 0  # generations that run or wait: the places in use
        self.num_clients: Callable[[], int] = lambda: 1  # keys that have a share; without keys all are one client
        self._held: dict[str, int] = {}  # of `in_flight`, by client
        self._undelivered = 0  # requests whose answer is not complete
        self._last_arrival = float("-inf")
        self._closed = False
        self._cut: ApiError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def reserve(self, count: int, param: str = "n", *, client: str = "") -> Iterator[Reservation]:
        """Hold `count` places, until they are released or the block ends: then the answer is delivered, or given up.

        `param`: the field of the request that asks for them. `client`: whose request it is.

        Raises:
            ApiError: 503 after `close`, 429 when the queue is full, 400 for more than there ever are.
        """
        self._require_room(count, param, client)
        reservation = Reservation(self, count, client)
        self._undelivered += 1
        self._last_arrival = asyncio.get_running_loop().time()
        self._idle.clear()
        try:
            yield reservation
        finally:
            reservation.release()
            self._undelivered -= 1
            if not self._undelivered:
                self._idle.set()

    def hold(self, client: str, count: int) -> None:
        """Count `count` more places as held by a client; fewer where it is negative."""
        self.in_flight += count
        self._held[client] = held = self._held.get(client, 0) + count
        if not held:
            del self._held[client]

    @property
    def last_arrival(self) -> float:
        """When the last request was admitted, by the event loop's clock; minus infinity before the first."""
        return self._last_arrival

    @property
    def undelivered(self) -> int:
        """Requests that were admitted and whose answer has not been written to the end."""
        return self._undelivered

    def close(self) -> None:
        """Refuse new requests with a 503 from now on; admitted ones continue."""
        self._closed = True

    def cut(self, error: ApiError) -> None:
        """Answer with `error` what is admitted and has not reached the engine: there is no time left for it."""
        self._cut = error

    def require_time(self) -> None:
        """Raises ApiError: after `cut`."""
        if self._cut is not None:
            raise self._cut

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait for the last answer to be delivered; False after the timeout."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    def _require_room(self, count: int, param: str, client: str) -> None:
        if self._closed:
            raise unavailable("The server is shutting down; try again.", "draining")
        if count > self.capacity:
            raise ApiError(
                400,
                f"The request asks for {count} answers ('{param}', times the prompts); this server holds at "
                f"most {self.capacity} at a time. Send several requests.",
                param=param,
                code="invalid_value",
            )
        if self.in_flight + count > self.capacity and not self._is_within_share(count, client):
            self.num_refused += 1
            raise ApiError(
                429,
                f"The queue is full ({self.in_flight} requests, at most {self.capacity}); try again later.",
                type_="rate_limit_error",
                code="queue_full",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def _is_within_share(self, count: int, client: str) -> bool:
        """Whether a client has places left that it need not share with others."""
        clients = self.num_clients()
        share = max(1, self.capacity // clients)
        is_within = self._held.get(client, 0) + count <= share
        return clients > 1 and is_within and self.in_flight + count <= MOST_SHARED_CAPACITY * self.capacity
