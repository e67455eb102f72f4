"""A client may end its side of the connection when its request is whole, as `nc -N` does, and still gets its answer.

A client that is gone looks the same at first; it is noticed, and keeps no place.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.server_thread import PATIENCE_SECONDS, ServerThread, serving, wait_for
from tests.support.slow_steps import SlowSteps

pytestmark = pytest.mark.deep

OK = b"HTTP/1.1 200 "


def completion(version: str = "1.1", **overrides: object) -> bytes:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    payload = json.dumps({**body, **overrides}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload


@contextmanager
def slow_server(folder: Path) -> Iterator[tuple[ServerThread, SlowSteps]]:
    slow = SlowSteps()
    with serving(folder, make_engine=slow.make, max_num_seqs=2) as server:
        try:
            yield server.wait_ready(), slow
        finally:
            slow.gate.set()


@contextmanager
def half_closed(server: ServerThread, sent: bytes) -> Iterator[socket.socket]:
    """A client that has sent these bytes and will send no more."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=PATIENCE_SECONDS) as link:
        link.sendall(sent)
        link.shutdown(socket.SHUT_WR)
        yield link


def to_the_end(link: socket.socket) -> bytes:
    received = b""
    while piece := link.recv(1 << 16):
        received += piece
    return received


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_request_is_answered_after_its_client_has_ended_its_side(
    server: ServerThread, stream: bool, version: str
) -> None:
    with half_closed(server, completion(version, stream=stream)) as link:
        answer = to_the_end(link)
    assert OK in answer
    assert answer.count(b'"finish_reason":"length"') == 1
    if version == "1.0":  # in 1.1 the head of the answer may be sent before the client's end is seen
        assert b"connection: close\r\n" in answer
    assert answer.endswith(b"0\r\n\r\n" if stream and version == "1.1" else b"[DONE]\n\n" if stream else b"}")


@pytest.mark.parametrize("rest", [b"", completion()[:30], completion()[:-10]], ids=["whole", "half a head", "half"])
def test_every_whole_request_is_answered_and_half_a_one_is_not_waited_for(server: ServerThread, rest: bytes) -> None:
    with half_closed(server, completion() * 3 + rest) as link:
        answer = to_the_end(link)
    assert answer.count(OK) == answer.count(b'"finish_reason":"length"') == 3
    assert answer.count(b"HTTP/1.1 4") == 0


@pytest.mark.parametrize("sent", [b"", completion()[:30], completion()[:-10]], ids=["nothing", "half a head", "half"])
def test_a_connection_without_a_whole_request_is_closed(server: ServerThread, sent: bytes) -> None:
    with half_closed(server, sent) as link:
        assert to_the_end(link) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_waits_long_is_asked_whether_it_is_there_and_gets_its_answer(
    tiny_model: Path, stream: bool
) -> None:
    with slow_server(tiny_model) as (server, slow):
        slow.gate.clear()
        with half_closed(server, completion(stream=stream)) as link:
            received, asked = b"", b": keep-alive\n\n" if stream else b"HTTP/1.1 100 Continue\r\n\r\n"
            while received.count(asked) < 3:
                received += link.recv(1 << 16)
            slow.gate.set()
            received += to_the_end(link)
        assert received.count(OK) == received.count(b'"finish_reason":"length"') == 1


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_keeps_no_place(tiny_model: Path, stream: bool, requests: int) -> None:
    """Its request has not begun, so that nothing is written that would show that it is gone."""
    with slow_server(tiny_model) as (server, slow):
        admission, connections = server.server.service.admission, server.server.service.connections
        slow.gate.clear()
        port = int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as link:
            link.sendall(completion(stream=stream) * requests)
            wait_for(lambda: admission.in_flight == 1, "the request to be admitted")
            if stream:
                assert link.recv(1 << 16).startswith(OK)  # unread bytes would make the kernel send a reset
        wait_for(lambda: admission.in_flight == admission.undelivered == 0, "its place to be free")
        wait_for(lambda: connections.num_busy == 0, "its connection to be closed")


@pytest.mark.parametrize(
    "garbage",
    [b"no HTTP\r\n\r\n", completion().replace(b"Content-Length", b"Content-Length: 1\r\nContent-Length"), b"\x00" * 9],
    ids=["words", "two lengths", "zeros"],
)
@pytest.mark.parametrize("apart", [False, True])
def test_garbage_behind_requests_is_answered_behind_them(tiny_model: Path, garbage: bytes, apart: bool) -> None:
    """The answers come in the order of the requests, and a running one is not cut."""
    with slow_server(tiny_model) as (server, slow):
        slow.gate.clear()
        port = int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as link:
            requests = completion(stream=True) + completion()
            link.sendall(requests if apart else requests + garbage)
            received = link.recv(1 << 16)
            if apart:
                link.sendall(garbage)
            slow.gate.set()
            received += to_the_end(link)
    assert [received.find(b"data: [DONE]") > 0, received.count(OK), received.count(b"HTTP/1.1 400 ")] == [True, 2, 1]
    assert received.rindex(OK) < received.index(b"HTTP/1.1 400 ")
    assert received.endswith(b'"code": "invalid_http"}}')
