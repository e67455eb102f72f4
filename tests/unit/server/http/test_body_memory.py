"""The memory that request bodies take together: what counts, for how long, and which body gives its memory up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import ApiError
from millstream_runtime.server.http.body_memory import BodyMemory, release_body
from millstream_runtime.server.http.body_parsing import model_of_request
from millstream_runtime.server.http.limits import LARGE_BODY_BYTES
from millstream_runtime.server.openai.requests import TokenizeRequest
from tests.support.server_thread import ServerThread, serving, wait_for

pytestmark = pytest.mark.deep

LATE_SECONDS = limits.LARGE_BODY_SECONDS + 1


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def scope() -> Scope:
    return {"state": {}, "headers": [(b"content-type", b"application/json")]}


def test_what_a_body_held_is_free_once_its_request_ends_or_it_is_refused() -> None:
    memory, one, other = BodyMemory(1000), scope(), scope()
    with memory.of_one(one) as held:
        held.count(LARGE_BODY_BYTES + 600)
        with memory.of_one(other) as second:
            second.count(LARGE_BODY_BYTES)
            second.count(400)
            with pytest.raises(ApiError, match="as many large request bodies as it may"):
                second.count(1)
            assert memory.used_bytes == 1000
        assert memory.used_bytes == 600
        release_body(one)
        assert memory.used_bytes == 0
    assert memory.used_bytes == 0


async def read_for_ever(memory: BodyMemory, num_bytes: int, reading: asyncio.Event) -> None:
    """Count a large body of that many bytes beyond the free ones, of which the rest never comes."""
    with memory.of_one(scope()) as held, held.arriving():
        held.count(LARGE_BODY_BYTES + num_bytes)
        reading.set()
        await asyncio.Event().wait()


async def started(memory: BodyMemory, num_bytes: int) -> asyncio.Task[None]:
    reading = asyncio.Event()
    task = asyncio.create_task(read_for_ever(memory, num_bytes, reading))
    await reading.wait()
    return task


async def test_the_oldest_body_that_comes_slowly_is_given_up_for_another() -> None:
    """Clients that send eight megabytes, then a byte every half a minute, kept all large bodies out for hours."""
    clock = Clock()
    memory = BodyMemory(1000, clock)
    oldest = await started(memory, 600)
    clock.seconds += 1
    younger = await started(memory, 400)
    clock.seconds = LATE_SECONDS - 0.5
    with memory.of_one(scope()) as held:
        held.count(LARGE_BODY_BYTES + 500)
        assert memory.used_bytes == 900
        with pytest.raises(ApiError, match="has been arriving for more than 30 s") as refused:
            await oldest
        assert (refused.value.status, refused.value.code) == (503, "too_many_large_bodies")
        with pytest.raises(ApiError, match="as many large"):
            held.count(101)  # the other one is a second younger
    assert memory.used_bytes == 400
    younger.cancel()
    with pytest.raises(asyncio.CancelledError):
        await younger
    assert memory.used_bytes == 0


async def test_a_body_is_not_given_up_before_its_time_nor_once_it_is_whole() -> None:
    clock = Clock()
    memory = BodyMemory(1000, clock)
    slow = await started(memory, 500)
    with memory.of_one(scope()) as whole, memory.of_one(scope()) as newest:
        with whole.arriving():
            whole.count(LARGE_BODY_BYTES + 500)
        with pytest.raises(ApiError, match="as many large"):
            newest.count(LARGE_BODY_BYTES + 1)
        assert not slow.done()
        clock.seconds = LATE_SECONDS
        newest.count(499)
        with pytest.raises(ApiError, match="for more than"):
            await slow
        with pytest.raises(ApiError, match="as many large"):
            newest.count(1)
    assert memory.used_bytes == 0


async def test_a_task_that_is_cancelled_by_others_too_ends_as_cancelled() -> None:
    clock = Clock()
    memory = BodyMemory(1000, clock)
    slow = await started(memory, 1000)
    clock.seconds = LATE_SECONDS
    with memory.of_one(scope()) as held:
        held.count(LARGE_BODY_BYTES + 1)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow


async def test_a_body_in_the_smallest_pieces_takes_little_more_than_its_bytes() -> None:
    """Each piece was kept as an object: two bytes took fifty."""
    body = json.dumps({"prompt": "x" * 400_000}).encode()
    sent = 0

    async def receive() -> Message:
        nonlocal sent
        sent += 2
        return {"type": "http.request", "body": body[sent - 2 : sent], "more_body": sent < len(body)}

    one = scope()
    with BodyMemory(1 << 20).of_one(one) as held, ThreadPoolExecutor(1) as threads:
        tracemalloc.start()
        try:
            await model_of_request(TokenizeRequest, one, receive, threads, held)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most_bytes < 5 * len(body)


def send(server: ServerThread, route: str, body: dict[str, Any]) -> httpx.Response:
    content = json.dumps(body).encode() + b" " * (2 * LARGE_BODY_BYTES)
    return httpx.post(server.url + route, content=content, headers={"Content-Type": "application/json"}, timeout=60)


@pytest.mark.parametrize("route", ["/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"])
def test_a_body_counts_until_its_prompt_is_tokenised(
    route: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty lists of a million ids that waited for the tokenizer took a gigabyte, and nothing limited their number."""
    monkeypatch.setattr(limits, "MAX_LARGE_BODIES_BYTES", 2 * LARGE_BODY_BYTES)
    monkeypatch.setattr(limits, "SHORT_PROMPT_CHARACTERS", 0)
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [1, 2]},
        "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 1},
        "/v1/chat/completions": {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 1,
        },
    }
    with serving(tiny_model) as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        tokenizer, begun, release = server.server.service.prompts.tokenizer, threading.Event(), threading.Event()

        def stuck(work: Callable[..., Any]) -> Callable[..., Any]:
            def wait(*arguments: Any, **settings: Any) -> Any:
                begun.set()
                assert release.wait(60)
                return work(*arguments, **settings)

            return wait

        for name in ("encode", "decode", "encode_chat"):
            monkeypatch.setattr(tokenizer, name, stuck(getattr(tokenizer, name)))
        waiting = pool.submit(send, server, route, bodies[route])
        assert begun.wait(60)
        refused = send(server, route, bodies[route])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_large_bodies")
        release.set()
        assert waiting.result().status_code == 200
        assert send(server, route, bodies[route]).status_code == 200


def test_a_body_counts_no_more_while_its_answer_is_generated(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LARGE_BODIES_BYTES", 2 * LARGE_BODY_BYTES)
    with serving(tiny_model) as server:
        server.wait_ready()
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
        for _ in range(3):
            assert send(server, "/v1/completions", body).status_code == 200


def test_a_slow_body_gets_its_503_while_it_is_sent(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LARGE_BODIES_BYTES", 2 * LARGE_BODY_BYTES)
    monkeypatch.setattr(limits, "LARGE_BODY_SECONDS", 0.0)
    head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
    with serving(tiny_model) as server:
        server.wait_ready()
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port or 80), timeout=60) as slow:
            slow.sendall(head.encode() + b" " * (2 * LARGE_BODY_BYTES))
            answers: list[int] = []

            def is_given_up() -> bool:
                answers.append(send(server, "/tokenize", {"prompt": "hi"}).status_code)
                slow.setblocking(False)
                try:
                    return slow.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
                except BlockingIOError:
                    return False
                finally:
                    slow.settimeout(60)

            wait_for(is_given_up, "the 503 of the slow one")
        assert answers[-1] == 200
