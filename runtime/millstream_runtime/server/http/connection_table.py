"""All open connections. At the cap the oldest one without a complete request is closed.

If all are busy, a few more may be open (`SPARE`): the probes of the kubelet must get an answer. Other requests on them
are refused with a 503.

    made ──▶ waiting ──request complete──▶ busy ──answer complete──▶ waiting (last in the line)
               │
               └ closed first, the oldest before the others: silent ones, half requests, idle kept-alive ones

A connection whose request is complete is never closed for another one.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Protocol

from millstream_runtime.server.http.connection_limits import ConnectionLimits

SPARE = 8  # connections without a complete request that may be open however many are busy


class CloseReason(StrEnum):
    """Why this server closed a connection that its client kept open."""

    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    WRITE_TIMEOUT = "write_timeout"
    TOO_MANY = "too_many_connections"


class TableConnection(Protocol):
    """A connection, as the table sees it."""

    def close_for_another(self) -> None:
        """Close at once: there are too many connections."""


class ConnectionTable:
    """Used on the event loop only."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.closed: Counter[CloseReason] = Counter()
        self._open: set[TableConnection] = set()
        self._waiting: dict[TableConnection, None] = {}  # for a complete request; the oldest first

    @property
    def num_waiting(self) -> int:
        """Connections without a complete request."""
        return len(self._waiting)

    @property
    def num_busy(self) -> int:
        """Connections whose request is complete and whose answer is not."""
        return len(self._open) - len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether as many connections are busy as may be open."""
        return self.num_busy >= self.limits.max_connections

    def add(self, connection: TableConnection) -> None:
        """A connection was made; close one if they are too many now."""
        self._open.add(connection)
        self._waiting[connection] = None
        if self.num_waiting > max(SPARE, self.limits.max_connections - self.num_busy):
            oldest = next(iter(self._waiting))
            self.remove(oldest)
            self.closed[CloseReason.TOO_MANY] += 1
            oldest.close_for_another()

    def request_complete(self, connection: TableConnection) -> None:
        """Its client waits for this server now."""
        self._waiting.pop(connection, None)

    def answer_complete(self, connection: TableConnection) -> None:
        """It waits for its client's next request."""
        if connection in self._open:
            self._waiting[connection] = None

    def remove(self, connection: TableConnection) -> None:
        """It is closed; unknown ones are no error."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
