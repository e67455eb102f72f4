"""/openapi.json is held against what the server answers: statuses, content types and bodies."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from millstream_runtime.server.openai import api_document
from tests.support.server_thread import ServerThread, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD_CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
GOOD_TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def document(server: ServerThread) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


def check(document: dict[str, Any], method: str, path: str, answer: httpx.Response) -> None:
    """The answer's status and body are in the document."""
    responses = document["paths"][path][method]["responses"]
    assert str(answer.status_code) in responses, (path, answer.status_code, answer.text)
    content = responses[str(answer.status_code)]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    schema = {**content[kind]["schema"], "components": document["components"]}
    if kind == "text/event-stream":
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert events
    else:
        events = [answer.json()] if kind == "application/json" else [answer.text]
    for event in events:
        jsonschema.validate(event, schema)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, GOOD_CHAT),
        (CHAT, {**GOOD_CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
        (CHAT, {**GOOD_CHAT, **STREAMED, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {**GOOD_CHAT, "stream": True}),
        (TEXT, GOOD_TEXT),
        (TEXT, {**GOOD_TEXT, "logprobs": 2, "prompt_logprobs": 1, "echo": True}),
        (TEXT, {**GOOD_TEXT, **STREAMED, "logprobs": 2}),
        ("/tokenize", {"prompt": "hi"}),
        ("/tokenize", {"messages": GOOD_CHAT["messages"], "return_token_strs": True}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
def test_answers_are_as_described(
    server: ServerThread, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    check(document, "post", path, answer)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "x" * 200},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": ["a", "b"]},
        {"prompt": ["a", ""]},
        {"prompt": ["a"] * 65},
        {"prompt": [1] * 100},
        {"prompt": [1, -1]},
        {"prompt": [[1], [2]]},
        {"prompt": [[1], []]},
        {"prompt": [[1]] * 65},
        {"prompt": ["a", 1]},
        {"stop": "x"},
        {"stop": ""},
        {"stop": []},
        {"stop": ["x"] * 16},
        {"stop": ["x"] * 17},
        {"stop": ["x", ""]},
        {"stop": "x" * 257},
        {"logit_bias": {"1": 100}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"a": 1}},
    ],
    ids=str,
)
def test_a_request_is_accepted_exactly_if_the_document_says_so(
    server: ServerThread, document: dict[str, Any], change: dict[str, Any]
) -> None:
    """The document gave a prompt of one string at most 64 characters."""
    body = GOOD_TEXT | {"max_tokens": 1} | change
    schema = document["components"]["schemas"]["CompletionRequest"] | {"components": document["components"]}
    described = jsonschema.Draft202012Validator(schema).is_valid(body)
    assert server.post(TEXT, body).status_code == (200 if described else 400)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/load", "/version", "/v1/models"])
def test_what_can_be_read_is_as_described(server: ServerThread, document: dict[str, Any], path: str) -> None:
    check(document, "get", path, server.get(path))


def test_the_load_is_as_described_with_answers_and_without(server: ServerThread, document: dict[str, Any]) -> None:
    assert server.post(CHAT, GOOD_CHAT).status_code == 200
    full = server.get("/load")
    assert full.json()["answers"]
    check(document, "get", "/load", full)
    check(document, "get", "/load", server.get(f"/load?since={full.json()['cursor']}"))
    check(document, "get", "/load", server.get("/load?since=x"))
    assert [one["name"] for one in document["paths"]["/load"]["get"]["parameters"]] == ["since"]


def test_errors_are_as_described(server: ServerThread, document: dict[str, Any]) -> None:
    for path, good in ((CHAT, GOOD_CHAT), (TEXT, GOOD_TEXT), ("/tokenize", {"prompt": "a"}), ("/detokenize", {})):
        wrong: list[Any] = [{**good, "no_such_field": 1}, {**good, "model": "other"}, [], None]
        for bad in wrong:
            answer = server.post(path, bad)
            assert answer.status_code in (400, 404)
            check(document, "post", path, answer)
    check(document, "get", "/v1/models/{model}", server.get("/v1/models/tiny"))
    check(document, "get", "/v1/models/{model}", server.get("/v1/models/other"))


def test_nothing_is_promised_that_never_comes(document: dict[str, Any]) -> None:
    assert "422" not in json.dumps(document["paths"])
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()
    keyless = json.dumps(document)
    assert '"401"' not in keyless
    assert '"403"' not in keyless
    assert "securitySchemes" not in document["components"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "200" in operation["responses"], (method, path)


def test_the_document_is_made_once_and_not_on_the_event_loop(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made for each request, and held the event loop for 25 ms."""
    make, threads = api_document._schemas, []

    def watched() -> Any:
        threads.append(threading.current_thread().name)
        return make()

    monkeypatch.setattr(api_document, "_schemas", watched)
    with serving(tiny_model) as server:
        assert server.get("/openapi.json").json() == server.get("/openapi.json").json()
    assert len(threads) == 1
    assert threads[0] != "server"  # the thread of the event loop


def test_keys_are_in_the_document_of_a_server_that_asks_for_them(tiny_model: Path, tmp_path: Path) -> None:
    keys, live = tmp_path / "keys", tmp_path / "live.json"
    keys.write_text("key-a\n")
    live.write_text(json.dumps({"probe_key_digests": [hashlib.sha256(b"probe").hexdigest()]}))
    with serving(tiny_model, api_keys_file=str(keys), live_config=live) as server:
        server.wait_ready()
        probe = {"Authorization": "Bearer probe"}
        limited = httpx.post(server.url + CHAT, json=GOOD_CHAT, headers=probe, timeout=60)
        found = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": "Bearer key-a"}).json()
        refused = server.post(CHAT, GOOD_CHAT)
    assert refused.status_code == 401
    check(found, "post", CHAT, refused)
    assert limited.status_code == 403
    check(found, "post", CHAT, limited)
    assert found["paths"][CHAT]["post"]["security"] == [{"apiKey": []}]
    assert "security" not in found["paths"]["/ready"]["get"]
