"""The body of `/load`: what somebody needs who chooses between replicas, several times per second.

It is made from counters alone, so it costs the same however many requests run. The engine's are those of its last step;
what was sent to it since is added, because a step with a long prompt may take a second. Where nothing was measured yet,
the rates are those of the steps that the warm-up timed (`step_times` of `/ready`).
"""

from __future__ import annotations

import msgspec

from millstream_runtime.boot import BootLedger
from millstream_runtime.engine.request import EngineStats
from millstream_runtime.engine.step_times import seconds_of_decodes
from millstream_runtime.server.engine.client import EngineClient
from millstream_runtime.server.operations.answered_requests import AnsweredRequest, AnsweredRequests
from millstream_runtime.server.operations.metrics import ServerMetrics


class QueuedAndRunning(msgspec.Struct, frozen=True):
    """Counts of what waits and of what is in the batch."""

    queued: int
    running: int


class KVBlocks(msgspec.Struct, frozen=True):
    """The KV pool. Blocks that only the prefix cache remembers are free."""

    free_blocks: int
    total_blocks: int
    block_size_tokens: int


class ReplicaLoad(msgspec.Struct, frozen=True):
    """None: there is no engine that serves, or no such step was measured."""

    boot_id: str
    phase: str
    requests: QueuedAndRunning | None
    tokens: QueuedAndRunning | None
    kv: KVBlocks | None
    prefill_tokens_per_second: float | None
    itl_seconds: float | None
    cursor: str
    missed: int
    answers: list[AnsweredRequest]


class LoadReport:
    """Makes the body from the parts of one server."""

    def __init__(
        self, ledger: BootLedger, engine: EngineClient, metrics: ServerMetrics, answered: AnsweredRequests
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._metrics = metrics
        self._answered = answered
        self._encoder = msgspec.json.Encoder()

    def body(self, since: str | None) -> bytes:
        """Return it as JSON, with the answers behind the cursor `since`.

        Raises:
            ApiError: 400, no such cursor was ever given.
        """
        engine, answered = self._engine, self._answered.since(since)
        stats = engine.stats if engine.is_ready else None
        load = ReplicaLoad(
            engine.boot_id,
            self._ledger.phase.value,
            requests=None if stats is None else self._requests(stats),
            tokens=None if stats is None else self._tokens(stats),
            kv=None if stats is None else _blocks(stats),
            prefill_tokens_per_second=None if stats is None else _rate(stats.prefill_tokens_per_second),
            itl_seconds=None if stats is None else self._itl_seconds(),
            cursor=answered.cursor,
            missed=answered.missed,
            answers=answered.answers,
        )
        return self._encoder.encode(load)

    def _requests(self, stats: EngineStats) -> QueuedAndRunning:
        return QueuedAndRunning(stats.num_requests_waiting + self._engine.untaken_requests, stats.num_requests_running)

    def _tokens(self, stats: EngineStats) -> QueuedAndRunning:
        return QueuedAndRunning(stats.queued_tokens + self._engine.untaken_tokens, stats.running_tokens)

    def _itl_seconds(self) -> float | None:
        measured = self._metrics.recent_itl_seconds
        if measured is None:
            measured = seconds_of_decodes(self._engine.step_times).get(1)
        return None if measured is None else round(measured, 6)


def _blocks(stats: EngineStats) -> KVBlocks:
    return KVBlocks(stats.kv_blocks_total - stats.kv_blocks_used, stats.kv_blocks_total, stats.block_size_tokens)


def _rate(tokens_per_second: float) -> float | None:
    return round(tokens_per_second, 3) if tokens_per_second > 0 else None
