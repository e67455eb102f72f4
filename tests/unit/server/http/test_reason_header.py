"""Every error object's code is also a header: a proxy decides by status and headers whether to ask another replica."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.chat_streams import CHAT, chat_body, in_background
from tests.support.server_thread import ServerThread, serving, wait_for
from tests.support.slow_steps import SlowSteps

TEXT = "/v1/completions"
GOOD = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
REASON = "x-millstream-reason"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "unknown_url"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
        ("GET", "/v1/models/other", None, 404, "model_not_found"),
        ("POST", TEXT, GOOD | {"model": "other"}, 404, "model_not_found"),
        ("POST", TEXT, GOOD | {"max_tokens": 0.5}, 400, "invalid_value"),
        ("POST", TEXT, GOOD | {"no_such_field": 1}, 400, "unknown_parameter"),
        ("POST", TEXT, GOOD | {"prompt": [1] * 100_000}, 400, "context_length_exceeded"),
        ("POST", TEXT, b"{", 400, "invalid_json"),
        ("POST", TEXT, b"1" * ((8 << 20) + 1), 413, "request_too_large"),
    ],
)
def test_an_error_repeats_its_code_in_a_header(
    server: ServerThread, method: str, path: str, content: Any, status: int, code: str
) -> None:
    sent = {"content": content} if isinstance(content, bytes) else {"json": content}
    headers = {"Content-Type": "application/json"}
    answer = httpx.request(method, server.url + path, headers=headers, timeout=60, **sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers[REASON] == code


def test_an_answer_that_is_no_error_has_no_reason(server: ServerThread) -> None:
    for answer in (server.post(TEXT, GOOD), server.get("/load"), server.get("/health")):
        assert answer.status_code == 200
        assert REASON not in answer.headers


def test_what_is_no_request_gets_the_reason_too(server: ServerThread) -> None:
    """The protocol answers by hand, before there is a request for the application."""
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60) as link:
        link.sendall(b"NONSENSE\r\n\r\n")
        answer = b""
        while part := link.recv(4096):
            answer += part
    head, body = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b'"code": "invalid_http"' in body
    assert b"\r\nx-millstream-reason: invalid_http" in head


def test_the_reasons_by_which_a_gateway_asks_another_replica(tiny_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    slow = SlowSteps()
    slow.gate.clear()
    bearer = {"Authorization": "Bearer key-a"}

    def post(headers: dict[str, str], **body: Any) -> httpx.Response:
        return httpx.post(server.url + CHAT, json=chat_body(**body), headers=headers, timeout=60)

    with serving(tiny_model, make_engine=slow.make, max_num_seqs=1, api_keys_file=str(keys)) as server:
        assert (refused := post({})).headers[REASON] == "invalid_api_key" == refused.json()["error"]["code"]
        loading = post(bearer)
        assert (loading.status_code, loading.headers[REASON]) == (503, "model_loading")
        slow.gate.set()
        server.wait_ready()
        slow.gate.clear()
        admission = server.server.service.admission
        full = in_background(lambda: post(bearer, max_tokens=1, n=admission.capacity))
        wait_for(lambda: admission.in_flight == admission.capacity, "a full queue")
        beyond = post(bearer, max_tokens=1)
        assert (beyond.status_code, beyond.headers[REASON]) == (429, "queue_full")
        slow.gate.set()
        assert full.result().status_code == 200
