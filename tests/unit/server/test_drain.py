"""A drain finishes what was accepted, refuses what comes later, and ends with an error what takes too long."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream_runtime.server.operations.drain import DrainCutoff
from tests.support.chat_streams import CHAT, chat_body, events_of, in_background
from tests.support.server_thread import serving, wait_for
from tests.support.slow_steps import SlowSteps

pytestmark = pytest.mark.deep


def test_drain_under_load_cuts_no_stream(tiny_model: Path) -> None:
    """Twelve streams with room for four in the batch: those that still queue at SIGTERM are finished too."""
    with serving(tiny_model, max_num_seqs=4) as server:
        server.wait_ready()

        def stream() -> list[str]:
            with events_of(server, chat_body(max_tokens=120)) as events:
                return list(events)

        with ThreadPoolExecutor(12) as pool:
            running = [pool.submit(stream) for _ in range(12)]
            wait_for(lambda: server.server.service.admission.in_flight == 12, "all streams accepted")
            server.begin_drain()
            answers = [future.result() for future in running]
        server.join()
    assert server.failure is None
    for received in answers:
        assert received[-1] == "[DONE]"
        assert json.loads(received[-2])["choices"][0]["finish_reason"] == "length"


def test_drain_serves_the_grace_then_refuses_then_ends(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, grace_over = SlowSteps(), threading.Event()  # the test says when the grace ends, not the clock
    monkeypatch.setattr(DrainCutoff, "seconds_until_close", lambda *_: 0.0 if grace_over.is_set() else 0.01)
    with serving(tiny_model, make_engine=slow.make, drain_timeout_seconds=600) as server:
        server.wait_ready()
        slow.gate.clear()
        running = in_background(lambda: server.post(CHAT, chat_body(max_tokens=3)))
        wait_for(lambda: server.server.service.admission.in_flight == 1, "the request")
        server.begin_drain()
        wait_for(lambda: server.get("/ready").status_code == 503, "not ready at once")
        assert server.get("/ready").json()["phase"] == "Draining"
        late = in_background(lambda: server.post(CHAT, chat_body(max_tokens=3)))  # within the grace
        wait_for(lambda: server.server.service.admission.in_flight == 2, "the late request")
        grace_over.set()
        wait_for(lambda: server.server.service.admission._closed, "new requests to be refused")
        answer = server.post(CHAT, chat_body())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close"
        slow.gate.set()
        for future in (running, late):
            assert future.result().json()["choices"][0]["finish_reason"] == "length"
        server.join()
    assert server.failure is None
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


def test_a_drain_that_takes_too_long_ends_streams_with_an_error_not_in_silence(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, drain_timeout_seconds=1) as server:
        server.wait_ready()
        slow.steps_left = 8
        with events_of(server, chat_body(max_tokens=1000)) as events:
            next(events)
            server.begin_drain()
            received = list(events)
        slow.steps_left = None
        slow.gate.set()
        server.join()
    assert received[-1] != "[DONE]"
    assert json.loads(received[-1])["error"]["code"] == "draining"


def test_a_drain_that_takes_too_long_ends_whole_answers_with_an_error_and_frees_their_places(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, drain_timeout_seconds=1) as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        slow.gate.clear()
        asked = pool.submit(server.post, CHAT, chat_body(max_tokens=1000))
        wait_for(lambda: server.server.service.admission.in_flight == 1, "the request")
        server.begin_drain()
        assert (asked.result().status_code, asked.result().json()["error"]["code"]) == (503, "draining")
        assert server.server.service.admission.in_flight == server.server.service.admission.undelivered == 0
        slow.gate.set()
        server.join()


def test_a_prompt_that_is_tokenised_at_the_end_of_a_drain_is_answered_with_an_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would begin with it, and the exit of the process would cut the answer."""
    begun, release = threading.Event(), threading.Event()
    with serving(tiny_model, drain_timeout_seconds=1) as server, ThreadPoolExecutor(1) as pool:
        server.wait_ready()
        encode_chat = server.server.service.prompts.tokenizer.encode_chat

        def held(messages: Any, template_kwargs: Any, seconds: float | None, *more: Any) -> list[int]:
            begun.set()
            assert release.wait(60)
            return encode_chat(messages, template_kwargs, seconds, *more)

        monkeypatch.setattr(server.server.service.prompts.tokenizer, "encode_chat", held)
        asked = pool.submit(server.post, CHAT, chat_body(max_tokens=1000))
        assert begun.wait(60)
        server.begin_drain()
        wait_for(lambda: server.server._http.should_exit, "the end of the drain")
        release.set()
        assert (asked.result().status_code, asked.result().json()["error"]["code"]) == (503, "draining")
        server.join()
