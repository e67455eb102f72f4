"""When there are too many connections the oldest without a request is closed, and probes are answered."""

from __future__ import annotations

import resource
from pathlib import Path

import httpx
import pytest

from millstream_runtime.server.http.connection_limits import connection_limits, max_connections
from millstream_runtime.server.http.connection_table import CloseReason
from tests.support.raw_clients import TEXT, chat, connected, require_service, served, to_the_end
from tests.support.server_thread import PATIENCE_SECONDS, wait_for


def test_many_idle_connections_give_way_to_a_new_one_and_running_answers_do_not(tiny_model: Path) -> None:
    with served(tiny_model, max_connections=12) as (server, slow):
        slow.gate.clear()
        with connected(server) as streaming:
            streaming.sendall(chat(stream=True))
            wait_for(lambda: server.server.service.connections.num_busy == 1, "the stream")
            idle = [connected(server) for _ in range(40)]
            wait_for(lambda: server.server.service.connections.num_waiting == 11, "the cap to be reached")
            for link in idle[:29]:  # the oldest
                assert to_the_end(link) == b""
            idle[-1].sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle[-1].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            slow.gate.set()
            require_service(server)
            received = b""
            while b"0\r\n\r\n" not in received:
                received += streaming.recv(1 << 16)
            assert b"data: [DONE]" in received
            assert server.metric("millstream_http_connections_closed_total", reason="too_many_connections") >= 29.0
            for link in idle:
                link.close()


def test_probes_are_answered_while_as_many_connections_are_busy_as_may_be(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tiny_model, max_connections=5) as (server, slow):
        slow.gate.clear()
        streams = [connected(server) for _ in range(5)]
        for link in streams:
            link.sendall(chat(stream=True))
        wait_for(lambda: server.server.service.connections.num_busy == 5, "every connection to be busy")
        for path in ("/health", "/ready", "/metrics", "/load"):
            assert server.get(path).status_code == 200
        refused = httpx.post(server.url + TEXT, json={}, headers={"X-Request-Id": "mine"}, timeout=PATIENCE_SECONDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
        assert refused.headers["x-request-id"] == "mine"
        assert refused.headers["x-millstream-reason"] == "too_many_connections"
        (line,) = [vars(one)["fields"] for one in caplog.records if one.message == "request_failed"]
        assert (line["request_id"], line["code"]) == ("mine", "too_many_connections")
        idle = [connected(server) for _ in range(40)]
        wait_for(
            lambda: server.server.service.connections.closed[CloseReason.TOO_MANY] >= 32, "the oldest to be closed"
        )
        assert server.get("/ready").status_code == 200
        slow.gate.set()
        for link in streams:
            received = b""
            while b"0\r\n\r\n" not in received:
                received += link.recv(1 << 16)
            assert b"data: [DONE]" in received
        require_service(server)
        for link in (*streams, *idle):
            link.close()


def test_a_kept_connection_is_served_again_and_again_below_the_cap(tiny_model: Path) -> None:
    with served(tiny_model, max_connections=1) as (server, _), httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(5):
            assert client.get("/version").status_code == 200
        wait_for(lambda: server.server.service.connections.num_waiting == 1, "the connection to be kept")


def test_the_soft_limit_of_open_files_is_raised_for_the_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, 1024)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        found = connection_limits(admission_capacity=320).max_connections
        assert found == max_connections(admission_capacity=320, open_files=hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_cap_leaves_room_for_every_admitted_request_and_for_other_files() -> None:
    assert max_connections(admission_capacity=320, open_files=1 << 20) == 4096
    assert max_connections(admission_capacity=20_480, open_files=1 << 20) == 21_504
    assert max_connections(admission_capacity=320, open_files=1024) == 448
