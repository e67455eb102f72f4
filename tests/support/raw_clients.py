"""Clients on plain sockets, and a small server with limits for those that never read or never finish a request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from millstream_runtime.server.http.connection_limits import ConnectionLimits
from tests.support.server_thread import PATIENCE_SECONDS, ServerThread, serving
from tests.support.slow_steps import SlowSteps

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FOREVER_SECONDS = 10 * PATIENCE_SECONDS
SHORT_SECONDS = 1.0
KERNEL_BYTES = 16 << 10
MAX_NUM_SEQS = 2
CAPACITY = MAX_NUM_SEQS + 64


def limits(**overrides: Any) -> ConnectionLimits:
    """No limit but those of `overrides`."""
    endless = {"head_seconds": FOREVER_SECONDS, "body_seconds": FOREVER_SECONDS, "write_seconds": FOREVER_SECONDS}
    return ConnectionLimits(**{**endless, **overrides})


@contextmanager
def served(folder: Path, **overrides: Any) -> Iterator[tuple[ServerThread, SlowSteps]]:
    """A small server with these limits, whose kernel keeps little of what a client does not read."""
    slow = SlowSteps()
    with serving(
        folder, make_engine=slow.make, max_num_seqs=MAX_NUM_SEQS, limits_of_connections=limits(**overrides)
    ) as server:
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)  # connections inherit it
        yield server.wait_ready(), slow


def connected(server: ServerThread) -> socket.socket:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    link.settimeout(PATIENCE_SECONDS)
    link.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return link


def chat(**overrides: Any) -> bytes:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    payload = json.dumps({**body, **overrides}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    return head.encode() + b"\r\n\r\n" + payload


def long_stream(answers: int) -> bytes:
    """A stream of far more than the kernel keeps, from generations that end by themselves."""
    return chat(n=answers, max_tokens=12, stream=True, logprobs=True, top_logprobs=20)


def to_the_end(link: socket.socket) -> bytes:
    """What comes until the server closes the connection, however it does."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := link.recv(1 << 16):
            received += piece
    return received


def status_and_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), json.loads(body)["error"]["code"]


def require_service(server: ServerThread) -> None:
    """A well-behaved client gets its answer."""
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    answer = server.post(TEXT, body)
    assert answer.status_code == 200, answer.text
