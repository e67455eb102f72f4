"""A body of the largest size is parsed, checked and tokenised while everybody else is served."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from millstream_runtime.server.http import body_parsing, limits
from millstream_runtime.server.http.api_errors import ApiError
from millstream_runtime.server.http.body_parsing import read_body
from millstream_runtime.server.http.limits import LARGE_BODY_BYTES
from millstream_runtime.server.openai.requests import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from tests.support.server_thread import ServerThread, serving

pytestmark = pytest.mark.deep

TEXT = "/v1/completions"
SHORT = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def largest(**fields: Any) -> bytes:
    """A valid body of exactly the size that is allowed."""
    empty = len(json.dumps({**SHORT, **fields, "prompt": ""}))
    body = json.dumps({**SHORT, **fields, "prompt": "x" * (limits.MAX_BODY_BYTES - empty)}).encode()
    assert len(body) == limits.MAX_BODY_BYTES
    return body


def send(server: ServerThread, body: bytes, route: str = TEXT) -> httpx.Response:
    return httpx.post(server.url + route, content=body, headers={"Content-Type": "application/json"}, timeout=60)


def test_a_small_request_is_answered_while_the_largest_body_is_parsed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release, done = threading.Event(), threading.Event(), threading.Event()

    def held(model: type[BaseModel], body: bytes) -> BaseModel:
        if len(body) == limits.MAX_BODY_BYTES:
            begun.set()
            assert release.wait(60)
        return read_body(model, body)

    monkeypatch.setattr(body_parsing, "read_body", held)
    with serving(tiny_model) as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        large = pool.submit(send, server, largest())
        large.add_done_callback(lambda _: done.set())
        assert begun.wait(60)
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 200
        assert server.post(TEXT, SHORT).json()["usage"]["completion_tokens"] == 2
        assert not done.is_set(), "all these came before the end of the large one"
        release.set()
        answer = large.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def answer_of(server: ServerThread, body: bytes, status: int) -> httpx.Response:
    """The answer once it has that status: what other connections hold changes soon after they send or leave."""
    until = time.monotonic() + 60
    while (answer := send(server, body)).status_code != status and time.monotonic() < until:
        time.sleep(0.05)
    assert answer.status_code == status, answer.text
    return answer


def test_half_sent_bodies_hold_bounded_memory_and_no_small_request_up(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is below the cap on a body and comes fast enough, but thousands may come."""
    monkeypatch.setattr(limits, "MAX_LARGE_BODIES_BYTES", 4 * LARGE_BODY_BYTES)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
    large = json.dumps(SHORT).encode() + b" " * (2 * LARGE_BODY_BYTES)
    with serving(tiny_model) as server:
        server.wait_ready()
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port or 80)) as half:
            half.sendall(head.encode() + b" " * (4 * LARGE_BODY_BYTES))
            refused = answer_of(server, large, 503)
            assert refused.json()["error"]["code"] == "too_many_large_bodies"
            assert "Retry-After" in refused.headers
            assert server.post(TEXT, SHORT).status_code == 200
        answer_of(server, large, 200)


def padded(body: dict[str, Any]) -> bytes:
    """The same JSON, too large for the loop."""
    return json.dumps(body).encode() + b" " * LARGE_BODY_BYTES


@pytest.mark.parametrize(
    "body",
    [
        SHORT,
        SHORT | {"prompt": list(range(10)), "logprobs": 2},
        SHORT | {"nonsense": 1},
        SHORT | {"temperature": "hot"},
        SHORT | {"tools": [1]},
        SHORT | {"max_tokens": 0},
        SHORT | {"prompt": [["x"]]},
        SHORT | {f"field{count}": 1 for count in range(limits.MAX_FIELDS)},
        {"prompt": "hi"},
        [],
    ],
)
def test_size_changes_nothing_in_the_answer(server: ServerThread, body: Any) -> None:
    small, large = send(server, json.dumps(body).encode()), send(server, padded(body))
    assert small.status_code == large.status_code
    volatile = {"id": "", "created": 0}
    assert small.json() | volatile == large.json() | volatile


@pytest.mark.parametrize("body", [b"{" * (LARGE_BODY_BYTES + 1), b"\xff" * (LARGE_BODY_BYTES + 1), b"[" * (4 << 20)])
def test_a_large_body_that_is_no_json_is_a_400(server: ServerThread, body: bytes) -> None:
    answer = send(server, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "prompt", [[1, *["x"] * 1_000_000], [[]] * 100_000, [None] * 100_000], ids=["ids", "[]", "null"]
)
def test_a_million_wrong_items_are_one_error(server: ServerThread, prompt: list[Any]) -> None:
    """Each would be an object of its own, created while the interpreter is held: 60 kB of `[]` became 56 MB."""
    body = json.dumps({**SHORT, "prompt": prompt}).encode()
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate(json.loads(body))
    assert refused.value.error_count() < 100
    answer = send(server, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("message", [{}, {f"field{count}": 1 for count in range(100)}], ids=["empty", "unknown fields"])
@pytest.mark.parametrize("model", [ChatCompletionRequest, TokenizeRequest])
def test_wrong_messages_have_the_errors_of_one(model: type[BaseModel], message: dict[str, int]) -> None:
    """Twelve kilobytes of `{}` held the event loop for 50 ms."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate({"model": "tiny", "messages": [message] * limits.MAX_MESSAGES})
    assert refused.value.error_count() <= limits.MAX_FIELDS


def test_names_that_clients_make_up_are_not_kept() -> None:
    """Each unknown field was kept by its name for as long as the server ran, and took the event loop 8 ms."""
    refuse_field("first")
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        for number in range(8):
            refuse_field(f"{number}{os.urandom(8).hex()}" + "x" * (1 << 20))
        gc.collect()
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_bytes - before_bytes < 1 << 20


def refuse_field(name: str) -> None:
    with pytest.raises(ApiError, match="Unknown parameter"):
        read_body(CompletionRequest, json.dumps({**SHORT, name: 1}).encode())


def test_chats_and_the_tokenizer_routes_take_large_bodies_too(server: ServerThread) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert send(server, padded(chat), "/v1/chat/completions").status_code == 200
    text = "x" * (LARGE_BODY_BYTES + 1)
    tokens = send(server, json.dumps({"prompt": text, "return_token_strs": True}).encode(), "/tokenize").json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == len(text)
    back = send(server, json.dumps({"tokens": tokens["tokens"]}).encode(), "/detokenize")
    assert back.json() == {"prompt": text}


def test_a_text_too_long_to_tokenise_is_told_its_length_the_limit_and_the_way_out(server: ServerThread) -> None:
    """Nothing else bounds it: a text that is only to be counted need not fit the context."""
    most = limits.MAX_TOKENIZE_CHARACTERS
    answer = send(server, json.dumps({"prompt": "x" * (most + 1)}).encode(), "/tokenize")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"Invalid 'prompt': it has {most + 1} characters, and at most {most} are tokenised at once; "
        "send the text in pieces."
    )
