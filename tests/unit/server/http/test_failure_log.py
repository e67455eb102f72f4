"""Each 5xx is one log line with the request's id and the cause, and never with a prompt. Metrics count it as error."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream_runtime.engine.request import FinishReason, RequestError, TokenOutput
from millstream_runtime.engine_process.loop import EngineLike
from tests.support.raw_clients import chat, connected
from tests.support.server_thread import PATIENCE_SECONDS, ServerThread, serving, wait_for
from tests.support.slow_steps import SlowSteps

pytestmark = pytest.mark.deep

TEXT = "/v1/completions"
BODY = {"model": "tiny", "prompt": "a secret", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def post(server: ServerThread, request_id: str, **overrides: Any) -> httpx.Response:
    headers = {"X-Request-Id": request_id}
    return httpx.post(server.url + TEXT, json=BODY | overrides, headers=headers, timeout=PATIENCE_SECONDS)


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of each `request_failed`."""
    return [vars(record)["fields"] for record in caplog.records if record.message == "request_failed"]


def give_up(engine: EngineLike, error: RequestError | None = None) -> None:
    """Let `engine` give up every request at its last token, as after a NaN."""
    step = engine.step

    def giving_up() -> Sequence[TokenOutput]:
        given_up = {"token_id": None, "finish_reason": FinishReason.ERROR, "error": error}
        return [replace(one, **given_up) if one.finish_reason else one for one in step()]  # type: ignore[arg-type]

    engine.step = giving_up  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_gives_up(tiny_model: Path, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        give_up(slow.engine)
        answer = post(server, "mine-1", stream=stream)
        assert "internal_error" in answer.text
        (line,) = logged(caplog)
        assert (line["request_id"], line["status"], line["code"]) == ("mine-1", 500, "internal_error")
        assert "gave the request up" in line["cause"]
        assert server.metric("vllm:request_success_total", finished_reason="error") == 1.0
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_which_there_was_no_memory(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        give_up(slow.engine, RequestError.OUT_OF_MEMORY)
        answer = post(server, "mine-3", stream=stream)
        assert "out_of_memory" in answer.text
        assert "shorter prompt" in answer.text
        if not stream:
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        (line,) = logged(caplog)
        assert (line["request_id"], line["status"], line["code"]) == ("mine-3", 503, "out_of_memory")
        assert "no memory for a step" in line["cause"]
        assert server.metric("vllm:request_success_total", finished_reason="error") == 1.0


def test_a_request_whose_engine_dies(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        slow.fail_with = ZeroDivisionError("a secret")
        assert post(server, "mine-2").status_code == 503
        (line,) = logged(caplog)
        assert (line["request_id"], line["code"]) == ("mine-2", "engine_failed")
        assert "ZeroDivisionError" in line["cause"]
        assert "secret" not in line["cause"]
        server.join()
        page = server.server.service.metrics.exposition().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1.0' in page


def test_a_bug_of_the_server(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()

        async def broken(*_: Any) -> None:
            raise ZeroDivisionError("a secret")

        monkeypatch.setattr(server.server.service, "completion", broken)
        assert post(server, "mine-3").status_code == 500
        wait_for(lambda: bool(logged(caplog)), "the log line")
        (line,) = logged(caplog)
        assert line["request_id"] == "mine-3"
        assert line["cause"].startswith("ZeroDivisionError at ")
        assert "in broken" in line["traceback"]
    assert "a secret" not in caplog.text  # nor in what uvicorn logs of it


@pytest.mark.parametrize("asked", [chat(), b"GET /v1/models/tiny HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_an_answer_behind_which_the_connection_is_closed_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, asked: bytes
) -> None:
    """A client that keeps the connection would send its next request into a closed one."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    with serving(tiny_model) as server:
        server.wait_ready()
        for name in ("chat", "require_model"):
            monkeypatch.setattr(server.server.service, name, broken)
        with connected(server) as link:
            link.sendall(asked)
            answer = b"".join(iter(lambda: link.recv(1 << 16), b""))  # until the server closes
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.lower().count(b"\r\nconnection: close\r\n") == 1


def test_a_4xx_is_not_logged_and_a_client_that_leaves_is_no_error(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        assert post(server, "mine-4", temperature=9).status_code == 400
        slow.gate.clear()
        with connected(server) as link:
            link.sendall(chat())
            wait_for(lambda: server.server.service.admission.in_flight == 1, "the request")
        wait_for(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == 1.0, "the disconnect")
        slow.gate.set()
        assert server.metric("vllm:request_success_total", finished_reason="error") == 0.0
        assert logged(caplog) == []


def test_what_is_no_http_is_not_logged(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Anybody who can connect could fill the log."""
    caplog.set_level(logging.INFO)
    with serving(tiny_model) as server:
        server.wait_ready()
        caplog.clear()
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60) as link:
            link.sendall(b"\x16\x03\x01 hello\r\n\r\n")
            assert link.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        assert caplog.records == []
