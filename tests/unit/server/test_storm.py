"""Storms: crowds of clients that leave at any moment, a drain in the middle of one, and a queue that overflows.

The clients speak HTTP over plain sockets, because a library would tidy up behind them: these cut a header, a body, a
wait or a stream in two. Every choice is drawn from a seed, so a failure can be run again:
`MILLSTREAM_STORM_CLIENTS=500 pytest tests/unit/server/test_storm.py` is the storm in full.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_processes import serving_from_a_process
from tests.support.server_thread import PATIENCE_SECONDS, ServerThread, serving, wait_for
from tests.support.slow_steps import SlowSteps

pytestmark = pytest.mark.deep

CHAT = "/v1/chat/completions"
NUM_CLIENTS = int(os.environ.get("MILLSTREAM_STORM_CLIENTS", "100"))
MAX_NUM_SEQS = 8
CAPACITY = MAX_NUM_SEQS + 64  # a full batch and the queue behind it


class Leaves(Enum):
    """When a client cuts its connection."""

    IN_HEADER = "in the header"
    IN_BODY = "in the body"
    WAITING = "before anything came back"
    READING = "after some bytes of the answer"
    NEVER = "after the whole answer"


@dataclass
class Client:
    """One connection: what it asks, when it leaves, and what it had read by then."""

    leaves: Leaves
    streamed: bool
    max_tokens: int
    arrives_seconds: float = 0.0
    patience_seconds: float = 0.0  # of one that leaves while it waits
    patience_bytes: int = 0  # of one that leaves while it reads
    resets: bool = False  # leaves with RST instead of FIN
    received: bytearray = field(default_factory=bytearray)

    @property
    def status(self) -> int:
        return int(self.received.split(b" ", 2)[1])

    @property
    def header(self) -> str:
        return self.received.partition(b"\r\n\r\n")[0].decode().lower()

    @property
    def is_whole(self) -> bool:
        """Whether a stream ended with its reason and [DONE], or a plain answer is JSON with a reason."""
        if self.streamed:
            return b'"finish_reason":"length"' in self.received and b"data: [DONE]" in self.received
        return bool(json.loads(self.received.partition(b"\r\n\r\n")[2])["choices"][0]["finish_reason"] == "length")

    async def visit(self, url: str) -> None:
        """Come, ask, leave."""
        await asyncio.sleep(self.arrives_seconds)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        try:
            header, body = self._request()
            writer.write(
                {Leaves.IN_HEADER: header[:40], Leaves.IN_BODY: header + body[:20]}.get(self.leaves, header + body)
            )
            await writer.drain()
            if self.leaves is Leaves.WAITING:
                await asyncio.sleep(self.patience_seconds)
            elif self.leaves is Leaves.READING:
                await self._read(reader, self.patience_bytes)
            elif self.leaves is Leaves.NEVER:
                await self._read(reader, None)
        finally:
            writer.transport.abort() if self.resets else writer.close()

    def _request(self) -> tuple[bytes, bytes]:
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.streamed,
        }
        body = json.dumps(asked).encode()
        lines = f"POST {CHAT} HTTP/1.1", "Host: storm", "Content-Type: application/json", "Connection: close"
        return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode(), body

    async def _read(self, reader: asyncio.StreamReader, limit_bytes: int | None) -> None:
        while limit_bytes is None or len(self.received) < limit_bytes:
            some = await asyncio.wait_for(reader.read(256), PATIENCE_SECONDS)
            if not some:
                return
            self.received += some


def crowd(seed: int, count: int) -> list[Client]:
    """`count` clients, every choice from the seed; about one in five stays to the end."""
    rng = random.Random(seed)
    return [
        Client(
            leaves=rng.choice(list(Leaves)),
            streamed=rng.random() < 0.5,
            max_tokens=rng.randint(1, 60),
            arrives_seconds=rng.uniform(0.0, 1.0),
            patience_seconds=rng.uniform(0.0, 0.3),
            patience_bytes=rng.randint(1, 4000),
            resets=rng.random() < 0.5,
        )
        for _ in range(count)
    ]


async def visit_all(server: ServerThread, clients: list[Client]) -> None:
    await asyncio.gather(*(client.visit(server.url) for client in clients))


def answer_of(server: ServerThread) -> str:
    """The answer of a request without load."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    answer = server.post(CHAT, {**body, "ignore_eos": True})
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("seed", [5, 6])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(tiny_model: Path, seed: int) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=MAX_NUM_SEQS) as server:
        server.wait_ready()
        before = answer_of(server)
        clients = crowd(seed, NUM_CLIENTS)
        asyncio.run(visit_all(server, clients))
        wait_for(lambda: server.server.service.admission.in_flight == 0, "every place to be free")
        wait_for(lambda: slow.engine.stats().kv_blocks_used == 0, "every KV block to be free")
        wait_for(lambda: not slow.engine.has_work(), "the engine to be idle")
        slow.engine.check_integrity()  # type: ignore[attr-defined]
        stats = slow.engine.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
        for client in clients:
            if client.leaves is Leaves.NEVER:
                assert client.status in (200, 429), client
                assert client.status == 429 or client.is_whole, client
        assert server.metric("vllm:request_success_total", finished_reason="abort") > 0.0, (
            "no client left in the middle"
        )
        assert answer_of(server) == before


def test_a_drain_in_a_storm_cuts_nobody_who_stays(tiny_model: Path) -> None:
    """While others disconnect, the remaining clients are served to the last token, streamed or not."""
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=MAX_NUM_SEQS) as server:
        server.wait_ready()
        slow.gate.clear()
        staying = [Client(Leaves.NEVER, streamed=bool(number % 2), max_tokens=40) for number in range(40)]
        leaving = [Client(Leaves.WAITING, streamed=bool(number % 2), max_tokens=40) for number in range(20)]
        for client in leaving:
            client.patience_seconds = 1.0

        async def storm() -> None:
            visits = asyncio.create_task(visit_all(server, staying + leaving))
            inside = server.server.service.admission
            await asyncio.to_thread(wait_for, lambda: inside.in_flight >= len(staying), "the crowd to be inside")
            server.begin_drain()
            slow.gate.set()
            await visits

        asyncio.run(storm())
        server.join()
    assert server.failure is None
    slow.engine.check_integrity()  # type: ignore[attr-defined]
    whole = [client.is_whole for client in staying if client.status == 200]
    assert len(whole) >= len(staying) - len(leaving)  # the drain may refuse the last of the crowd
    assert all(whole)
    assert all(client.status in (200, 503) for client in staying)


def test_a_queue_that_overflows_refuses_at_once_and_serves_the_rest(tiny_model: Path) -> None:
    """The engine stands still meanwhile: a refusal never waits for it, and admitted requests get the whole answer."""
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=MAX_NUM_SEQS) as server:
        server.wait_ready()
        slow.gate.clear()
        clients = [Client(Leaves.NEVER, streamed=bool(number % 2), max_tokens=5) for number in range(CAPACITY + 28)]

        async def overflow() -> list[Client]:
            visits = [asyncio.create_task(client.visit(server.url)) for client in clients]
            excess = len(clients) - CAPACITY
            await asyncio.to_thread(wait_for, lambda: sum(task.done() for task in visits) >= excess, "the refusals")
            refused = [client for client, task in zip(clients, visits, strict=True) if task.done()]
            slow.gate.set()
            await asyncio.gather(*visits)
            return refused

        refused = asyncio.run(asyncio.wait_for(overflow(), PATIENCE_SECONDS))
        assert [client.status for client in refused] == [429] * (len(clients) - CAPACITY)
        assert all("\r\nretry-after: 1" in client.header for client in refused)
        assert sum(client.status == 200 and client.is_whole for client in clients) == CAPACITY
        wait_for(lambda: slow.engine.stats().kv_blocks_used == 0, "every KV block to be free")
        slow.engine.check_integrity()  # type: ignore[attr-defined]


def test_an_engine_killed_in_a_storm_leaves_nobody_hanging(tiny_model: Path) -> None:
    """Across the border of two processes: remaining clients get an answer or an error, and the next engine serves."""
    with serving_from_a_process(tiny_model, max_num_seqs=MAX_NUM_SEQS, restart_delays_seconds=(0.0,)) as (
        server,
        engines,
    ):
        server.wait_ready()
        before = answer_of(server)
        clients = crowd(7, NUM_CLIENTS)
        for client in clients[::4]:  # answers that are under way when it happens
            client.leaves, client.max_tokens = Leaves.NEVER, 1500

        async def storm() -> None:
            visits = asyncio.create_task(visit_all(server, clients))
            inside = server.server.service.admission
            await asyncio.to_thread(wait_for, lambda: inside.in_flight >= MAX_NUM_SEQS, "a crowd to be inside")
            os.kill(engines.launched[0].pid, signal.SIGKILL)
            await visits

        asyncio.run(asyncio.wait_for(storm(), PATIENCE_SECONDS))
        wait_for(lambda: server.server.service.admission.in_flight == 0, "every place to be free")
        stayed = [client for client in clients if client.leaves is Leaves.NEVER]
        for client in stayed:
            assert client.status in (200, 429, 503), client
            was_refused = b'"code":"engine_failed"' in client.received.replace(b'": "', b'":"')
            assert client.status == 429 or was_refused or client.is_whole, client
        assert any(b"engine_failed" in client.received for client in stayed)
        wait_for(lambda: server.get("/ready").status_code == 200, "the next engine")
        assert answer_of(server) == before
        assert server.metric("vllm:num_requests_running", model_name="tiny") == 0.0
