"""Clients that never read, never finish a request or never begin one keep no other client out.

Every limit is set to some seconds. No test says how long something took: the silent client is closed in the
end, and the well-behaved one is served.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from millstream_runtime.server.http.connection_limits import ConnectionLimits
from millstream_runtime.server.http.limits import MAX_BODY_BYTES
from tests.support.asgi_thread import serving_app
from tests.support.raw_clients import (
    CAPACITY,
    CHAT,
    KERNEL_BYTES,
    SHORT_SECONDS,
    TEXT,
    chat,
    connected,
    long_stream,
    require_service,
    served,
    status_and_code,
    to_the_end,
)
from tests.support.server_thread import wait_for

pytestmark = pytest.mark.deep

SLOW_READER_SECONDS = 3 * SHORT_SECONDS  # of a limit that a client must not run into when its machine is busy


def read_slowly(link: socket.socket) -> bytes:
    """Some bytes, and then a fifth of the time in which a client must read anything."""
    piece = link.recv(KERNEL_BYTES)
    assert piece, "the server has closed the connection"
    time.sleep(SLOW_READER_SECONDS / 5)
    return piece


def test_answers_that_nobody_reads_hold_no_place(tiny_model: Path) -> None:
    """Two connections ask for as many answers as there are places, and never read."""
    with served(tiny_model) as (server, slow):
        admission = server.server.service.admission
        with connected(server) as one, connected(server) as other:
            slow.gate.clear()
            for link in (one, other):
                link.sendall(long_stream(CAPACITY // 2))
            wait_for(lambda: admission.in_flight == CAPACITY, "every place to be taken")
            slow.gate.set()
            wait_for(lambda: admission.in_flight == 0, "every place to be free")
            assert admission.undelivered == 2
            require_service(server)
            received = b""
            while b"data: [DONE]" not in received:  # what they did not read was kept for them
                received += one.recv(1 << 16)
            assert received.count(b'"finish_reason":"length"') == CAPACITY // 2


def test_a_client_that_does_not_read_is_closed(tiny_model: Path) -> None:
    with served(tiny_model, write_seconds=SHORT_SECONDS) as (server, _):
        with connected(server) as link:
            link.sendall(long_stream(8))
            wait_for(lambda: bool(server.server.service.connections.closed), "the connection to be closed")
            assert b"data: [DONE]" not in to_the_end(link)
        assert server.metric("millstream_http_connections_closed_total", reason="write_timeout") == 1.0
        assert server.server.service.admission.in_flight == 0
        require_service(server)


def test_a_client_that_reads_slowly_gets_everything(tiny_model: Path) -> None:
    with served(tiny_model, write_seconds=SLOW_READER_SECONDS) as (server, _), connected(server) as link:
        link.sendall(long_stream(2))
        received = b""
        while b"data: [DONE]" not in received:
            received += read_slowly(link)
        assert received.count(b'"finish_reason":"length"') == 2


def test_a_stream_whose_engine_is_slow_is_not_cut(tiny_model: Path) -> None:
    short = {"head_seconds": SHORT_SECONDS, "body_seconds": SHORT_SECONDS, "write_seconds": SHORT_SECONDS}
    with served(tiny_model, **short) as (server, slow), connected(server) as link:
        slow.gate.clear()
        link.sendall(chat(stream=True))
        time.sleep(2 * SHORT_SECONDS)
        slow.gate.set()
        received = b""
        while b"0\r\n\r\n" not in received:
            received += link.recv(1 << 16)
        assert b"data: [DONE]" in received
        time.sleep(2 * SHORT_SECONDS)  # a connection that is kept alive has another, longer limit
        link.sendall(chat())
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (chat()[:40], "head_timeout"),
        (b"\r\n\r\n", "head_timeout"),
        (chat()[:-10], "body_timeout"),
        (chat().partition(b"\r\n\r\n")[0] + b"\r\n\r\n", "body_timeout"),
    ],
    ids=["half a head", "line ends only", "half a body", "no body"],
)
@pytest.mark.parametrize("follows_another", [False, True])
def test_a_request_that_does_not_come_is_a_408(
    tiny_model: Path, sent: bytes, reason: str, follows_another: bool
) -> None:
    with served(tiny_model, head_seconds=SHORT_SECONDS, body_seconds=SHORT_SECONDS) as (server, _):
        with connected(server) as link:
            if follows_another:
                link.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            link.sendall(sent)
            require_service(server)
            assert status_and_code(to_the_end(link)) == (408, "request_timeout")
        assert server.metric("millstream_http_connections_closed_total", reason=reason) == 1.0


def test_a_connection_that_says_nothing_is_closed_without_an_answer(tiny_model: Path) -> None:
    with served(tiny_model, head_seconds=SHORT_SECONDS) as (server, _), connected(server) as link:
        assert to_the_end(link) == b""


def test_a_half_request_behind_a_running_one_does_not_cut_it(tiny_model: Path) -> None:
    short = {"head_seconds": SHORT_SECONDS, "body_seconds": SHORT_SECONDS}
    with served(tiny_model, **short) as (server, slow), connected(server) as link:
        slow.gate.clear()
        link.sendall(chat() + chat()[:30])
        time.sleep(2 * SHORT_SECONDS)
        slow.gate.set()
        received = to_the_end(link)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 408 " in received


def test_the_time_of_a_pipelined_body_begins_with_the_answer_before_it(tiny_model: Path) -> None:
    """This server does not read it before that."""
    with served(tiny_model, body_seconds=4 * SHORT_SECONDS) as (server, slow), connected(server) as link:
        slow.gate.clear()
        link.sendall(chat() + chat()[:-20])
        time.sleep(5 * SHORT_SECONDS)
        slow.gate.set()
        received = b""
        while not received.endswith(b"}"):
            received += link.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 200 ")
        link.sendall(chat()[-20:-10])
        require_service(server)  # the half of the rest has been read by now
        link.sendall(chat()[-10:])
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_long_body_that_keeps_coming_is_taken() -> None:
    found = ConnectionLimits(body_seconds=30.0, least_body_bytes_per_second=500.0)
    assert found.body_seconds_left(0.0, 0) == 30.0
    assert found.body_seconds_left(600.0, 500 * 600) == 30.0  # ten minutes, at the least rate
    assert found.body_seconds_left(25.0, 1) == pytest.approx(5.002)  # a byte now and then gains nothing
    assert found.body_seconds_left(600.0, 600) == 0.0


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_413_is_read_by_a_client_that_sends_everything_first(tiny_model: Path, connection: str) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n"
    with served(tiny_model) as (server, _), connected(server) as link:
        link.sendall(head.encode() + body)
        link.shutdown(socket.SHUT_WR)
        assert status_and_code(to_the_end(link)) == (413, "request_too_large")


def test_a_body_without_end_after_its_answer_is_cut_off(tiny_model: Path) -> None:
    """By its length for a client that is fast, by its time for one that is slow."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    with served(tiny_model, linger_bytes=1 << 20) as (server, _), connected(server) as link:
        link.sendall(head)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            link.sendall(b"x" * (64 << 20))
        require_service(server)
    with served(tiny_model, linger_seconds=SHORT_SECONDS) as (server, _), connected(server) as link:
        link.sendall(head)
        assert to_the_end(link).startswith(b"HTTP/1.1 413 ")
        wait_for(lambda: server.server.service.connections.num_waiting == 0, "the connection to be closed")


def test_a_connection_whose_body_came_after_the_answer_is_not_kept_for_ever() -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    with serving_app(refuse, keep_alive_seconds=1) as running, running.connect() as link:
        for _ in range(2):  # it is kept, for a while
            link.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
            received = b""
            while not received.endswith(b"no"):
                received += link.recv(1 << 16)
            link.sendall(b"late")
        assert to_the_end(link) == b""


def test_a_request_in_one_piece_with_a_late_body_is_answered_whole() -> None:
    """The time limit of an idle connection, which the late body starts again, does not run while it is answered."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["method"] == "GET":
            await asyncio.sleep(2 * SHORT_SECONDS)
        await send({"type": "http.response.body", "body": b"ok"})

    with serving_app(app, keep_alive_seconds=1) as running, running.connect() as link:
        link.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
        received = b""
        while not received.endswith(b"ok"):
            received += link.recv(1 << 16)
        link.sendall(b"lateGET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert to_the_end(link).endswith(b"ok")


def test_a_drain_waits_for_a_slow_reader_and_not_for_one_that_never_reads(tiny_model: Path) -> None:
    with (
        served(tiny_model, write_seconds=SLOW_READER_SECONDS) as (server, _),
        connected(server) as silent,
        connected(server) as slow_reader,
    ):
        for link in (silent, slow_reader):
            link.sendall(long_stream(4))
        assert slow_reader.recv(KERNEL_BYTES).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: server.server.service.admission.in_flight == 0, "the engine to be done")
        server.begin_drain()
        received = b""
        while b"data: [DONE]" not in received:
            received += read_slowly(slow_reader)
        server.join()
        assert b"data: [DONE]" not in to_the_end(silent)


def test_a_drain_does_not_wait_for_half_a_body(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with served(tiny_model) as (server, _), connected(server) as link:
        link.sendall(chat()[:-10].replace(b"Host: x", b"Host: x\r\nX-Request-Id: half-1"))
        wait_for(lambda: server.server.service.connections.num_waiting == 1, "the connection")
        server.get("/version")  # the half request has been read by now
        server.begin_drain(0.0)
        assert status_and_code(to_the_end(link)) == (503, "draining")
        server.join()
    (line,) = [vars(record)["fields"] for record in caplog.records if record.message == "request_failed"]
    assert (line["request_id"], line["status"], line["code"]) == ("half-1", 503, "draining")


def test_more_answers_than_there_are_places_is_a_400(tiny_model: Path) -> None:
    """Not a 429, which would be the answer for ever."""
    with served(tiny_model) as (server, _):
        answer = server.post(TEXT, {"model": "tiny", "prompt": "hi", "max_tokens": 1, "n": CAPACITY + 1})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("n", "invalid_value")
        assert str(CAPACITY) in error["message"]
        best_of = server.post(TEXT, {"model": "tiny", "prompt": "hi", "max_tokens": 1, "best_of": CAPACITY + 1})
        assert best_of.json()["error"]["param"] == "best_of"


def test_occupancy_and_connections_are_metrics(tiny_model: Path) -> None:
    with served(tiny_model) as (server, slow), connected(server) as link:
        assert server.metric("millstream_admission_capacity", model_name="tiny") == CAPACITY
        slow.gate.clear()
        link.sendall(chat(n=3))
        wait_for(lambda: server.server.service.admission.in_flight == 3, "the request")
        assert server.metric("millstream_admission_in_use", model_name="tiny") == 3.0
        assert server.metric("millstream_answers_undelivered", model_name="tiny") == 1.0
        assert server.metric("millstream_http_connections_limit", model_name="tiny") == 4096.0
        assert server.metric("millstream_http_connections", state="busy") == 2.0  # this one, and the scrape
        slow.gate.set()
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert server.metric("millstream_admission_in_use", model_name="tiny") == 0.0
