"""Which writes are sent together and which alone, as seen by a client on a plain socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from millstream_runtime.server.http import protocol
from millstream_runtime.server.http.coalescing_transport import MAX_COALESCED_BYTES
from millstream_runtime.server.http.disconnect import on_disconnect
from tests.support.asgi_thread import serving_app
from tests.support.server_thread import PATIENCE_SECONDS, ServerThread, serving, wait_for
from tests.support.slow_steps import SlowSteps

CHAT = "/v1/chat/completions"


def get(path: str, *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


def chat(**overrides: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **overrides}
    payload = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def connected(server: ServerThread) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=PATIENCE_SECONDS)


def until(link: socket.socket, end: bytes) -> bytes:
    """Everything up to and with `end`."""
    received = b""
    while end not in received:
        piece = link.recv(1 << 20)
        assert piece, received
        received += piece
    return received


def to_the_end(link: socket.socket) -> bytes:
    pieces = []
    while piece := link.recv(1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


async def answer(send: Send, body: bytes, status: int = 200) -> None:
    length = [] if status == 204 else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": length})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """/N: a body of N bytes; /204: none at all; /stop: breaks behind the head."""
    path = scope["path"][1:]
    if path == "stop":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        raise RuntimeError("a bug in the application")
    await answer(send, b"" if path == "204" else b"x" * int(path), 204 if path == "204" else 200)


def test_a_whole_answer_comes_in_one_piece_on_a_connection_that_stays(server: ServerThread) -> None:
    with connected(server) as link:
        for _ in range(3):
            link.sendall(chat())
            received = link.recv(1 << 20)
            assert received.startswith(b"HTTP/1.1 200 ")
            assert json.loads(body_of(received))["usage"]["completion_tokens"] == 3


def test_a_stream_begins_before_its_first_token_and_each_event_leaves_when_it_is_made(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as running:
        running.wait_ready()
        slow.gate.clear()
        with connected(running) as link:
            link.sendall(chat(stream=True, max_tokens=2))
            assert link.recv(1 << 20).endswith(b"\r\n\r\n")  # the head, while the engine stands still
            slow.gate.set()
            rest = until(link, b"0\r\n\r\n")
            assert rest.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


def test_events_are_not_gathered() -> None:
    go_on = threading.Semaphore(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"event %d" % number, "more_body": True})
            await asyncio.to_thread(go_on.acquire)
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    with serving_app(app) as running, running.connect() as link:
        link.sendall(get("/"))
        first = link.recv(1 << 20)
        assert first.endswith(b"\r\n\r\n7\r\nevent 0\r\n")  # with the head, as it was there at once
        for number in (1, 2):
            go_on.release()
            assert link.recv(1 << 20) == b"7\r\nevent %d\r\n" % number
        go_on.release()
        assert link.recv(1 << 20) == b"4\r\nlast\r\n0\r\n\r\n"


def test_the_end_of_a_stream_is_one_piece(server: ServerThread) -> None:
    with connected(server) as link:
        link.sendall(chat(stream=True, stream_options={"include_usage": True}))
        pieces = [link.recv(1 << 20)]
        while not pieces[-1].endswith(b"0\r\n\r\n"):
            pieces.append(link.recv(1 << 20))
        assert b'"finish_reason":"length"' in pieces[-1]
        assert b'"completion_tokens":3' in pieces[-1]
        assert b"data: [DONE]" in pieces[-1]


@pytest.mark.parametrize("size", [0, 1, MAX_COALESCED_BYTES, MAX_COALESCED_BYTES + 1, 8 << 20])
def test_every_body_arrives_whole(size: int) -> None:
    with serving_app(echo) as running, running.connect() as link:
        for _ in range(2):
            link.sendall(get(f"/{size}"))
            received = until(link, b"\r\n\r\n")
            while len(body_of(received)) < size:
                received += link.recv(1 << 20)
            assert body_of(received) == b"x" * size


def test_answers_without_a_body_do_not_wait() -> None:
    with serving_app(echo) as running, running.connect() as link:
        for request, status in ((get("/5", method="HEAD"), b"200"), (get("/204"), b"204"), (get("/0"), b"200")):
            link.sendall(request)
            received = link.recv(1 << 20)
            assert received.startswith(b"HTTP/1.1 " + status)
            assert received.endswith(b"\r\n\r\n")


def test_pipelined_requests_are_answered_in_order() -> None:
    with serving_app(echo) as running, running.connect() as link:
        link.sendall(get("/1") + get("/2") + get("/3") + get("/4", "Connection: close"))
        heads = to_the_end(link).split(b"HTTP/1.1 200 OK")[1:]
        assert [body_of(head) for head in heads] == [b"x" * size for size in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "request_", [get("/3", version="1.0"), get("/3", "Connection: close")], ids=["http-1.0", "connection-close"]
)
def test_the_connection_ends_behind_the_answer(request_: bytes) -> None:
    with serving_app(echo) as running, running.connect() as link:
        link.sendall(request_)
        received = to_the_end(link)
        assert b"connection: close" in received
        assert body_of(received) == b"xxx"


def test_a_head_without_its_body_is_sent_before_the_connection_ends() -> None:
    with serving_app(echo) as running, running.connect() as link:
        link.sendall(get("/stop"))
        received = to_the_end(link)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert body_of(received) == b""


def test_a_request_that_is_none_gets_its_400() -> None:
    with serving_app(echo) as running, running.connect() as link:
        link.sendall(b"nonsense\r\n\r\n")
        assert to_the_end(link).startswith(b"HTTP/1.1 400 ")


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(server: ServerThread) -> None:
    head, _, body = chat().partition(b"\r\n\r\n")
    with connected(server) as link:
        link.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert link.recv(1 << 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
        link.sendall(body)
        assert link.recv(1 << 20).startswith(b"HTTP/1.1 200 ")


def test_a_slow_reader_holds_its_stream_back_and_gets_all_of_it() -> None:
    piece, pieces, sent = b"x" * 16384, 4096, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for sent in range(1, pieces + 1):
            await send({"type": "http.response.body", "body": piece, "more_body": sent < pieces})

    with serving_app(app) as running, running.connect(receive_buffer_bytes=65536) as link:
        link.sendall(get("/", "Connection: close"))
        wait_for(lambda: any(one.flow.write_paused for one in running.connections), "the stream to be held back")
        assert sent < pieces
        assert to_the_end(link).count(b"x") == len(piece) * pieces


@pytest.mark.parametrize("resets", [False, True])
def test_a_disconnect_is_notified_once_and_at_once(resets: bool) -> None:
    notified: list[str] = []
    waiting = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()

        def callback() -> None:
            notified.append("gone")
            gone.set()

        with on_disconnect(scope, callback):
            waiting.set()
            await gone.wait()
        with on_disconnect(scope, lambda: notified.append("late")):
            pass

    with serving_app(app) as running:
        with running.connect() as link:
            link.sendall(get("/"))
            assert waiting.wait(PATIENCE_SECONDS)
            if resets:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_for(lambda: len(notified) == 2, "the disconnect to be noticed")
    assert notified == ["gone", "late"]


def test_a_disconnect_after_a_body_that_paused_the_reading_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn reads no more once it holds 64 KiB, and a body that comes in one piece leaves it there."""
    monkeypatch.setattr(protocol, "MAX_READ_BYTES", 256 << 10)  # all of it is one piece
    body = b"x" * (80 << 10)
    loop_is_held, is_sent, notified = threading.Event(), threading.Event(), threading.Event()
    paused: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reading = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        loop_is_held.set()
        is_sent.wait(PATIENCE_SECONDS)  # holds the loop up, so that it reads all of the body at once
        await reading
        paused.extend(one.flow.read_paused for one in running.connections)
        with on_disconnect(scope, notified.set):
            await asyncio.to_thread(notified.wait, PATIENCE_SECONDS)

    with serving_app(app) as running:
        with running.connect() as link:
            link.sendall(get("/", f"Content-Length: {len(body)}", method="POST"))
            assert loop_is_held.wait(PATIENCE_SECONDS)
            link.sendall(body)
            is_sent.set()
            wait_for(lambda: bool(paused), "the body to be read")
            assert paused == [True]
        assert notified.wait(PATIENCE_SECONDS)


def test_an_answered_request_is_not_notified() -> None:
    notified: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with on_disconnect(scope, lambda: notified.append("gone")):
            await answer(send, b"done")

    with serving_app(app) as running:
        with running.connect() as link:
            link.sendall(get("/"))
            until(link, b"done")
        wait_for(lambda: not running.connections, "the connection to be lost")
    assert notified == []


def test_what_the_client_has_not_taken_is_not_sent() -> None:
    """However much of it this machine's kernel keeps."""
    with serving_app(echo) as running, running.connect(receive_buffer_bytes=4096) as link:
        link.sendall(get(f"/{64 << 10}"))
        assert link.recv(1) == b"H"
        (one,) = running.connections
        wait_for(lambda: not one.transport.get_write_buffer_size(), "the kernel to have all of it")
        first = one.transport.sent_bytes
        assert first < 64 << 10
        link.recv(32 << 10, socket.MSG_WAITALL)
        wait_for(lambda: one.transport.sent_bytes > first, "what the client reads to be counted")
