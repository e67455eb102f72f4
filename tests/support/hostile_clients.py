"""Clients that do what a client must not: each is one connection, and every choice comes from a seed."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

KERNEL_BYTES = 16 << 10
PIPELINED = 4


class Misdeed(StrEnum):
    """What a client does."""

    SILENT = "connects and says nothing"
    HALF_HEAD = "sends half of its headers"
    HALF_BODY = "sends half of its body"
    NO_HTTP = "sends something else than HTTP"
    NEVER_READS = "asks for a long stream and reads nothing"
    CANCELS = "leaves before or in the middle of its answer"
    PIPELINES = "sends several requests in one piece"
    READS_SLOWLY = "reads its stream a little at a time"


@dataclass
class HostileClient:
    """`visit` ends when the server has closed the connection, when the answer is complete, or after `patience`."""

    misdeed: Misdeed
    arrives_seconds: float
    patience_seconds: float
    max_tokens: int
    cancels_after_bytes: int
    pause_seconds: float
    received: bytearray = field(default_factory=bytearray)
    outcome: str = ""

    @property
    def must_be_served(self) -> bool:
        """It is odd, and within its rights."""
        return self.misdeed in (Misdeed.PIPELINES, Misdeed.READS_SLOWLY)

    async def visit(self, port: int, model: str) -> None:
        """Come, misbehave, leave."""
        await asyncio.sleep(self.arrives_seconds)
        link = socket.socket()
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.patience_seconds):
                await loop.sock_connect(link, ("127.0.0.1", port))
                self.outcome = await self._misbehave(loop, link, model)
        except TimeoutError:
            self.outcome = "left"
        except OSError:  # closed with a reset, while it wrote or read
            self.outcome = "closed"
        finally:
            link.close()

    async def _misbehave(self, loop: asyncio.AbstractEventLoop, link: socket.socket, model: str) -> str:
        whole = self._request(model)
        head, _, _ = whole.partition(b"\r\n\r\n")
        sent = {
            Misdeed.SILENT: b"",
            Misdeed.HALF_HEAD: head[: len(head) // 2],
            Misdeed.HALF_BODY: whole[:-20],
            Misdeed.NO_HTTP: b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
            Misdeed.PIPELINES: whole * PIPELINED,
        }.get(self.misdeed, whole)
        if sent:
            await loop.sock_sendall(link, sent)
        if self.misdeed is Misdeed.CANCELS and not self.cancels_after_bytes:
            return "left"
        if self.misdeed is Misdeed.NEVER_READS:
            await asyncio.sleep(self.patience_seconds)
        while True:
            piece = await loop.sock_recv(link, 1024 if self.misdeed is Misdeed.READS_SLOWLY else 1 << 16)
            if not piece:
                return "closed"
            self.received += piece
            if self.misdeed is Misdeed.CANCELS and len(self.received) >= self.cancels_after_bytes:
                return "left"
            if self.is_served:
                return "served"
            if self.misdeed is Misdeed.READS_SLOWLY:
                await asyncio.sleep(self.pause_seconds)

    @property
    def is_served(self) -> bool:
        """Whether it has all that it asked for."""
        if self.misdeed is Misdeed.PIPELINES:
            return self.received.count(b'"finish_reason":"length"') == PIPELINED
        return b"data: [DONE]\n\n\r\n0\r\n\r\n" in self.received[-64:]

    def _request(self, model: str) -> bytes:
        streams = self.misdeed is not Misdeed.PIPELINES
        body: dict[str, Any] = {
            "model": model,
            "prompt": "hi",
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": streams,
        }
        if self.misdeed is Misdeed.NEVER_READS:
            body["logprobs"] = 20
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
        return head.encode() + b"Content-Type: application/json\r\n\r\n" + payload


def hostile_crowd(
    seed: int, count: int, *, arrive_within_seconds: float, patience_seconds: float, most_tokens: int
) -> list[HostileClient]:
    """`count` clients, as many of each kind as there can be; a slow reader has all the patience it needs."""
    rng = random.Random(seed)
    kinds = list(Misdeed)
    return [
        HostileClient(
            misdeed=(misdeed := kinds[number % len(kinds)]),
            arrives_seconds=rng.uniform(0.0, arrive_within_seconds),
            patience_seconds=10 * patience_seconds
            if misdeed in (Misdeed.PIPELINES, Misdeed.READS_SLOWLY)
            else rng.uniform(0.1, 1.0) * patience_seconds,
            max_tokens=rng.randint(most_tokens // 10, most_tokens),
            cancels_after_bytes=rng.choice((0, 1, rng.randint(1, 20_000))),
            pause_seconds=rng.uniform(0.005, 0.05),
        )
        for number in range(count)
    ]


async def visit_all(clients: list[HostileClient], port: int, model: str) -> None:
    """All of them; whatever a server does to one, the others go on."""
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*(client.visit(port, model) for client in clients))
