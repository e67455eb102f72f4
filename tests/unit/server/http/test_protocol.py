"""What comes outside a body is capped too: headers without end, and trailers behind a chunked body."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from millstream_runtime.server.http.protocol import MAX_HEAD_BYTES
from tests.support.server_thread import ServerThread

TEXT = "/v1/completions"
BODY = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
MOST_SENT_BYTES = 64 << 20  # far more than any buffer on the way holds


def sent_until_closed(server: ServerThread, beginning: bytes, endless: bytes) -> tuple[int, bytes]:
    """Bytes that went out before the server closed, and what it had answered."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    with socket.create_connection((address.hostname, address.port), timeout=60) as link:
        link.sendall(beginning)
        sent, answer = len(beginning), b""
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < MOST_SENT_BYTES:
                link.sendall(endless)
                sent += len(endless)
        with suppress(ConnectionResetError):  # the answer was lost with what the server never read
            answer = link.recv(65536)
        return sent, answer


@pytest.mark.parametrize(
    ("beginning", "endless"),
    [
        (HEAD + b"X-Long: ", b"x" * 65536),
        (HEAD, b"X-One: of many\r\n" * 4096),
        (b"GET /", b"x" * 65536),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"X-Trailer: of many\r\n" * 4096),
    ],
    ids=["one-header", "many-headers", "request-line", "trailers"],
)
def test_what_never_ends_is_cut_off(server: ServerThread, beginning: bytes, endless: bytes) -> None:
    sent, answer = sent_until_closed(server, beginning, endless)
    assert sent < MOST_SENT_BYTES
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert server.get("/health").status_code == 200


def test_headers_up_to_the_cap_and_bodies_in_small_chunks_are_served(server: ServerThread) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (BODY[start : start + 3] for start in range(0, len(BODY), 3))

    headers = {"Content-Type": "application/json", "X-Long": "x" * (MAX_HEAD_BYTES - 4096)}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(3):  # on one connection: each request is counted alone
            assert client.post(TEXT, content=BODY, headers=headers).status_code == 200
            assert client.post(TEXT, content=chunks(), headers=headers).status_code == 200
