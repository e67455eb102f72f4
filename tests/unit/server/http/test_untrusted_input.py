"""What a hostile client tries that no single bad parameter shows; `contracts/test_security_classes.py` has the list."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream_runtime.engine.request import Request
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.server.engine.client import EngineClient
from millstream_runtime.server.engine.output_queue import OutputQueue
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_keys import OPEN_PATHS
from millstream_runtime.tokenizing import template_limits
from tests.support.server_thread import ServerThread, serving, wait_for
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

TEXT = "/v1/completions"
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


def test_a_prompt_that_is_slow_to_tokenise_delays_no_other_request_and_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()
        tokenizer, release, begun = server.server.service.prompts.tokenizer, threading.Event(), threading.Event()
        encode = tokenizer.encode

        def stuck(text: str, **settings: Any) -> list[int]:
            if text == "hostile":
                begun.set()
                release.wait(60)
            return encode(text, **settings)

        monkeypatch.setattr(tokenizer, "encode", stuck)
        monkeypatch.setattr(limits, "SHORT_PROMPT_CHARACTERS", 3)  # long enough for a thread, in a tiny context
        with ThreadPoolExecutor(1) as pool:
            hostile = pool.submit(server.post, TEXT, {**BODY, "prompt": "hostile"})
            assert begun.wait(60)
            assert server.get("/health").status_code == 200
            assert server.post(TEXT, BODY).status_code == 200  # another thread tokenises, the loop runs
            release.set()
            assert hostile.result().status_code == 200

            begun.clear()
            release.clear()
            monkeypatch.setattr(limits, "TOKENIZE_TIMEOUT_SECONDS", 0.05)
            hostile = pool.submit(server.post, TEXT, {**BODY, "prompt": "hostile"})
            assert hostile.result().status_code == 400
            assert hostile.result().json()["error"]["code"] == "prompt_too_complex"
            wait_for(lambda: server.server.service.admission.in_flight == 0, "its place to be free")
            release.set()


def test_a_chat_that_waits_too_long_for_another_is_not_blamed_for_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model) as server, ThreadPoolExecutor(limits.SHORT_CHAT_THREADS) as pool:
        server.wait_ready()
        tokenizer, release, begun = server.server.service.prompts.tokenizer, threading.Event(), threading.Semaphore(0)
        encode_chat = tokenizer.encode_chat

        def stuck(messages: Any, template_kwargs: Any, seconds: float | None, *more: Any) -> list[int]:
            if messages[0]["content"] == "hostile":
                begun.release()
                release.wait(60)
            return encode_chat(messages, template_kwargs, seconds, *more)

        monkeypatch.setattr(tokenizer, "encode_chat", stuck)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hostile"}], "max_tokens": 1}
        hostile = [pool.submit(server.post, "/v1/chat/completions", chat) for _ in range(limits.SHORT_CHAT_THREADS)]
        for _ in hostile:
            assert begun.acquire(timeout=60)
        monkeypatch.setattr(limits, "TOKENIZE_TIMEOUT_SECONDS", 0.05)
        waiting = server.post("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "hi"}]})
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "tokenizer_busy")
        assert "retry-after" in waiting.headers
        release.set()
        assert {one.result().status_code for one in hostile} == {200}


def test_a_template_that_computes_without_end_is_a_400_and_others_are_served_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    hours = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"{{% if messages[0].content == 'slow' %}}{hours}{{% endif %}}hi")
    monkeypatch.setattr(limits, "SHORT_CHAT_SECONDS", 0.05)
    slow = {"model": "tiny", "messages": [{"role": "user", "content": "slow"}]}
    with serving(folder) as server, ThreadPoolExecutor(8) as pool:
        server.wait_ready()
        tokenizer, long_renders = server.server.service.prompts.tokenizer, threading.Semaphore(0)
        encode_chat = tokenizer.encode_chat

        def watched(messages: Any, template_kwargs: Any, seconds: float | None, *more: Any) -> list[int]:
            if seconds is None:
                long_renders.release()
            return encode_chat(messages, template_kwargs, seconds, *more)

        monkeypatch.setattr(tokenizer, "encode_chat", watched)
        monkeypatch.setattr(template_limits, "MAX_RENDER_SECONDS", 2.0)
        answers = [pool.submit(server.post, "/tokenize", slow) for _ in range(8)]
        assert long_renders.acquire(timeout=60)
        quick = slow | {"messages": [{"role": "user", "content": "quick"}]}
        assert server.post("/tokenize", quick).status_code == 200
        errors = [(one.result().status_code, one.result().json()["error"]["code"]) for one in answers]
        assert errors == [(400, "prompt_too_complex")] * 8


def test_no_chat_template_and_no_long_prompt_is_worked_on_by_the_event_loop(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may loop for long over a short chat; every stream would wait for it."""
    with serving(tiny_model) as server:
        server.wait_ready()
        tokenizer, threads = server.server.service.prompts.tokenizer, []
        encode, encode_chat = tokenizer.encode, tokenizer.encode_chat

        def watched(text: str, **settings: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return encode(text, **settings)

        def watched_chat(messages: Any, template_kwargs: Any, seconds: float | None, *more: Any) -> list[int]:
            threads.append(threading.current_thread().name)
            return encode_chat(messages, template_kwargs, seconds, *more)

        monkeypatch.setattr(tokenizer, "encode", watched)
        monkeypatch.setattr(tokenizer, "encode_chat", watched_chat)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert server.post("/v1/chat/completions", chat | {"max_tokens": 1}).status_code == 200
        assert server.post("/tokenize", chat).status_code == 200
        server.post(TEXT, BODY | {"prompt": "x" * (limits.SHORT_PROMPT_CHARACTERS + 1)})
        assert len(threads) == 3
        assert "server" not in threads  # the thread of the event loop


def test_prompts_that_are_slow_to_tokenise_keep_no_short_chat_waiting(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_model) as server, ThreadPoolExecutor(3) as pool:
        server.wait_ready()
        tokenizer, release = server.server.service.prompts.tokenizer, threading.Event()
        encode, begun = tokenizer.encode, threading.Semaphore(0)

        def stuck(text: str, **settings: Any) -> list[int]:
            if text == "hostile":
                begun.release()
                release.wait(60)
            return encode(text, **settings)

        monkeypatch.setattr(tokenizer, "encode", stuck)
        monkeypatch.setattr(limits, "SHORT_PROMPT_CHARACTERS", 3)
        hostile = [pool.submit(server.post, TEXT, {**BODY, "prompt": "hostile"}) for _ in range(3)]
        for _ in range(2):
            assert begun.acquire(timeout=60)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        release.set()
        assert [one.result().status_code for one in hostile] == [200] * 3


def test_short_prompts_wait_for_no_thread_of_long_ones(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates that compute without end hold these threads, too: short prompts got a 503 meanwhile."""
    with serving(tiny_model) as server, ThreadPoolExecutor(3) as pool:
        server.wait_ready()
        tokenizer, release = server.server.service.prompts.tokenizer, threading.Event()
        encode, begun = tokenizer.encode, threading.Semaphore(0)

        def stuck(text: str, **settings: Any) -> list[int]:
            if len(text) > limits.SHORT_PROMPT_CHARACTERS:
                begun.release()
                release.wait(60)
            return encode(text, **settings)

        monkeypatch.setattr(tokenizer, "encode", stuck)
        long = {**BODY, "prompt": "x" * (limits.SHORT_PROMPT_CHARACTERS + 1)}
        waiting = [pool.submit(server.post, TEXT, long) for _ in range(3)]
        for _ in range(2):
            assert begun.acquire(timeout=60)
        ids = {**BODY, "prompt": [5, 6], "echo": True}
        short = [(TEXT, {**BODY, "prompt": "hi"}), (TEXT, ids), ("/tokenize", {"model": "tiny", "prompt": "hi"})]
        for path, body in [*short, ("/detokenize", {"model": "tiny", "tokens": [5, 6]})]:
            assert server.post(path, body).status_code == 200
        assert not release.is_set()
        release.set()
        assert all(one.result().status_code for one in waiting)


def test_many_empty_messages_are_no_short_chat(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four thousand have no characters, and kept every short chat waiting for 80 ms."""
    with serving(tiny_model) as server:
        server.wait_ready()
        tokenizer, threads = server.server.service.prompts.tokenizer, []
        encode_chat = tokenizer.encode_chat

        def watched(messages: Any, template_kwargs: Any, seconds: float | None, *more: Any) -> list[int]:
            threads.append(threading.current_thread().name.rpartition("_")[0])
            return encode_chat(messages, template_kwargs, seconds, *more)

        monkeypatch.setattr(tokenizer, "encode_chat", watched)
        for count in (1, limits.MAX_MESSAGES):
            server.post("/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": ""}] * count})
        assert threads == ["short-chats", "tokenizer"]
        chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": ""}]}
        for text in ("short", "x" * limits.SHORT_PROMPT_CHARACTERS):
            server.post("/tokenize", chat | {"chat_template_kwargs": {"persona": text}})
        assert threads[2:] == ["short-chats", "tokenizer"], "nor is one with much for the template to write"


def test_a_template_that_makes_a_long_prompt_of_a_short_chat_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    """Tokenising takes hundreds of bytes of memory for every character."""
    folder = write_tiny_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ 'word ' * (messages[0].content | int) }}")
    with serving(folder) as server:
        server.wait_ready()

        def ask(words: int) -> tuple[int, str | None, str]:
            answer = server.post("/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": str(words)}]})
            error = answer.json().get("error", {})
            return answer.status_code, error.get("code"), error.get("message", "")

        assert ask(1000)[0] == 200, "longer than the context, and quickly counted"
        status, code, message = ask(3_000_000)
        assert (status, code) == (400, "context_length_exceeded")
        assert "at least" in message


@pytest.mark.parametrize("token_ids", [[], [1 << 20]], ids=["none", "outside the vocabulary"])
def test_messages_that_make_no_usable_prompt_are_a_400(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, token_ids: list[int]
) -> None:
    """The engine refused them, and the client was told that the engine had stopped and that it should try again."""
    with serving(tiny_model) as server:
        server.wait_ready()
        monkeypatch.setattr(server.server.service.prompts.tokenizer, "encode_chat", lambda *_: token_ids)
        answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": ""}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_token_past_the_tokenizer_is_no_crash(server: ServerThread) -> None:
    """The embedding is padded: the model can choose ids that no token has, here because a bias makes it."""
    for token_id in (259, 271):  # the vocabulary ends at 272, which is no multiple of any tile
        answer = server.post(TEXT, {**BODY, "logit_bias": {str(token_id): 100}, "logprobs": 1})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert server.post("/detokenize", {"tokens": [token_id]}).status_code == 200


def test_a_bug_tells_nothing_of_the_inside(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()

        async def broken(*_: Any) -> None:
            raise ZeroDivisionError("/secret/path at 0x7f00")

        monkeypatch.setattr(server.server.service, "completion", broken)
        answer = server.post(TEXT, BODY)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "Internal server error."
        assert "secret" not in answer.text
        assert server.get("/health").status_code == 200
        assert server.server.service.admission.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_the_answer_begins_is_a_503(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Also for a stream: a 200 with an error event would keep a client from trying again."""
    with serving(tiny_model) as server:
        server.wait_ready()

        def dead(self: EngineClient, request: Request, queue: OutputQueue) -> None:
            raise RuntimeFailure(FailureReason.RUNTIME_CRASHED, "The engine is not ready.")

        monkeypatch.setattr(EngineClient, "submit", dead)
        answer = server.post(TEXT, BODY | {"stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        assert "Retry-After" in answer.headers
        assert server.server.service.admission.in_flight == 0


def test_every_route_but_the_probes_needs_a_key(tiny_model: Path, tmp_path: Path) -> None:
    """Whatever route is added later: closed unless it is a probe."""
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    with serving(tiny_model, api_keys_file=str(keys)) as server:
        server.wait_ready()
        document = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": "Bearer key-a"}).json()
        routes = [(path, method) for path, methods in document["paths"].items() for method in methods]
        assert len(routes) >= 9
        for path, method in routes:
            status = httpx.request(method, server.url + path.replace("{model}", "tiny"), timeout=60).status_code
            assert (status == 401) is (path not in OPEN_PATHS), (path, status)
        for path in ("/docs", "/redoc", "/openapi.json", "/admin", "/pause", "/sleep", "/shutdown", "//v1/models"):
            assert server.get(path).status_code == 401, path


def test_every_parameter_has_a_bound(server: ServerThread) -> None:
    """By the API's own schema: each number has a range and each list and string a greatest length."""
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    assert "ChatCompletionRequest" in schemas
    unbounded = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        if name.endswith("Request")
        for field, described in schema.get("properties", {}).items()
        if not is_bounded(described)
    ]
    # Their caps are in validators, because OpenAI's unions have several shapes; `test_bad_requests` proves them, and
    # `test_template_kwargs`.
    assert set(unbounded) <= {f"{one}.{field}" for one in schemas for field in CHECKED_BY_VALIDATORS}


CHECKED_BY_VALIDATORS = (
    "prompt",
    "stop",
    "logit_bias",
    "messages",
    "logprobs",
    "stream_options",
    "chat_template_kwargs",
)


def is_bounded(described: dict[str, Any]) -> bool:
    choices = described.get("anyOf", [described])
    return all(
        one.get("type") in ("boolean", "null")
        or "$ref" in one
        or "enum" in one
        or "const" in one
        or (one.get("type") in ("integer", "number") and any(key.lower().endswith("maximum") for key in one))
        or (one.get("type") == "string" and "maxLength" in one)
        or (one.get("type") == "array" and "maxItems" in one)
        for one in choices
    )
