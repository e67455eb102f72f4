"""Every bad request gets a 4xx with one sentence that names the parameter, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from millstream_runtime.server.http import limits
from millstream_runtime.server.openai.request_fields import IGNORED_PARAMETERS
from tests.support.server_thread import ServerThread

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD_CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
GOOD_TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 1}


def parts(**fields: Any) -> dict[str, Any]:
    """A message of two parts, the second with further fields."""
    return {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "hi", **fields}]}


# (route, what to change in a good request, status, param, code)
BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (CHAT, {"model": "gpt-4"}, 404, "model", "model_not_found"),
    (CHAT, {"model": None}, 400, "model", "missing_required_parameter"),
    (CHAT, {"messages": None}, 400, "messages", "missing_required_parameter"),
    (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": "hi"}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages.0.role", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages.0.content", "missing_required_parameter"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, 400, "messages.0.content", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
        400,
        "messages.0.content",
        "invalid_value",
    ),
    (CHAT, {"messages": [{**MESSAGES[0], "mood": "good"}]}, 400, "messages.0.mood", "unknown_parameter"),
    (CHAT, {"messages": [parts(mood="good")]}, 400, "messages.0.content.1.mood", "unknown_parameter"),
    (CHAT, {"messages": [parts(**{"\ud800": 1})]}, 400, "messages.0.content.1.\\ud800", "unknown_parameter"),
    (CHAT, {"messages": [{**MESSAGES[0], "tool_calls": [{}]}]}, 400, "messages.0.tool_calls", "unsupported_parameter"),
    (CHAT, {"messages": [*MESSAGES, {**MESSAGES[0], "audio": {}}]}, 400, "messages.1.audio", "unsupported_parameter"),
    (CHAT, {"skip_special_tokens": False}, 400, "skip_special_tokens", "unsupported_parameter"),
    (CHAT, {"use_beam_search": True}, 400, "use_beam_search", "unsupported_parameter"),
    (CHAT, {"length_penalty": 2}, 400, "length_penalty", "unsupported_parameter"),
    (CHAT, {"add_special_tokens": True}, 400, "add_special_tokens", "unsupported_parameter"),
    (TEXT, {"add_special_tokens": False}, 400, "add_special_tokens", "unsupported_parameter"),
    (TEXT, {"add_generation_prompt": True}, 400, "add_generation_prompt", "unknown_parameter"),
    (CHAT, {"messages": MESSAGES * (limits.MAX_MESSAGES + 1)}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 4_000_000}]}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"max_tokens": 5000}, 400, "messages", "context_length_exceeded"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": "7"}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": True}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 10**30}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_completion_tokens": 2}, 400, "max_tokens", "conflicting_parameters"),
    (CHAT, {"temperature": -0.1}, 400, "temperature", "invalid_value"),
    (CHAT, {"temperature": 2.1}, 400, "temperature", "invalid_value"),
    (CHAT, {"temperature": float("nan")}, 400, "temperature", "invalid_value"),
    (CHAT, {"temperature": float("inf")}, 400, "temperature", "invalid_value"),
    (CHAT, {"top_p": float("-inf")}, 400, "top_p", "invalid_value"),
    (CHAT, {"top_p": 1.5}, 400, "top_p", "invalid_value"),
    (CHAT, {"top_k": -2}, 400, "top_k", "invalid_value"),
    (CHAT, {"top_k": 1.5}, 400, "top_k", "invalid_value"),
    (CHAT, {"seed": 2**63}, 400, "seed", "invalid_value"),
    (CHAT, {"stop": ""}, 400, "stop", "invalid_value"),
    (CHAT, {"stop": ["x"] * 17}, 400, "stop", "invalid_value"),
    (CHAT, {"stop": ["x" * 300]}, 400, "stop", "invalid_value"),
    (CHAT, {"stop": [1]}, 400, "stop", "invalid_value"),
    (CHAT, {"stop": 1}, 400, "stop", "invalid_value"),
    (CHAT, {"stop_token_ids": [1] * 65}, 400, "stop_token_ids", "invalid_value"),
    (CHAT, {"stop_token_ids": [-1]}, 400, "stop_token_ids.0", "invalid_value"),
    (CHAT, {"min_tokens": 2}, 400, "min_tokens", "invalid_value"),
    (CHAT, {"stop": ["x"] * 1000}, 400, "stop", "invalid_value"),
    (CHAT, {"stop_token_ids": [272]}, 400, "stop_token_ids", "invalid_value"),
    (CHAT, {"stop_token_ids": [2**30], "max_tokens": 3, "min_tokens": 2}, 400, "stop_token_ids", "invalid_value"),
    (CHAT, {"min_p": 1.5}, 400, "min_p", "invalid_value"),
    (CHAT, {"min_p": float("nan")}, 400, "min_p", "invalid_value"),
    (CHAT, {"presence_penalty": 2.5}, 400, "presence_penalty", "invalid_value"),
    (CHAT, {"frequency_penalty": float("inf")}, 400, "frequency_penalty", "invalid_value"),
    (CHAT, {"frequency_penalty": "1"}, 400, "frequency_penalty", "invalid_value"),
    (CHAT, {"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
    (CHAT, {"repetition_penalty": float("inf")}, 400, "repetition_penalty", "invalid_value"),
    (CHAT, {"logit_bias": {"1": 101}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"1": float("nan")}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"1": float("-inf")}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"1": 10**400}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"1": True}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"a": 1}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"-1": 1}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"272": 1}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(100_000)}}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logit_bias": [1]}, 400, "logit_bias", "invalid_value"),
    (CHAT, {"logprobs": 5}, 400, "logprobs", "invalid_value"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs", "conflicting_parameters"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
    (CHAT, {"prompt_logprobs": 1}, 400, "prompt_logprobs", "unsupported_parameter"),
    (CHAT, {"echo": True}, 400, "echo", "unsupported_parameter"),
    (CHAT, {"best_of": 2}, 400, "best_of", "unsupported_parameter"),
    (CHAT, {"priority": 101}, 400, "priority", "invalid_value"),
    (CHAT, {"priority": "high"}, 400, "priority", "invalid_value"),
    (CHAT, {"cache_salt": ""}, 400, "cache_salt", "invalid_value"),
    (CHAT, {"cache_salt": "x" * 257}, 400, "cache_salt", "invalid_value"),
    (CHAT, {"n": 0}, 400, "n", "invalid_value"),
    (CHAT, {"n": 129}, 400, "n", "invalid_value"),
    (CHAT, {"n": 10**9}, 400, "n", "invalid_value"),
    (CHAT, {"stream": "yes"}, 400, "stream", "invalid_value"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options", "conflicting_parameters"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "unknown_parameter"),
    (CHAT, {"chat_template": "{{ 1 }}"}, 400, "chat_template", "unknown_parameter"),
    (CHAT, {"temprature": 1}, 400, "temprature", "unknown_parameter"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
    (TEXT, {"prompt": None}, 400, "prompt", "missing_required_parameter"),
    (TEXT, {"prompt": ""}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": []}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [[]]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [1, "a"]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": {"text": "a"}}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [-1]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [272]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": [2**40]}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": ["a"] * 65}, 400, "prompt", "invalid_value"),
    (TEXT, {"prompt": ["a", "x" * 4_000_000]}, 400, "prompt", "context_length_exceeded"),
    (TEXT, {"prompt": "x" * 2048}, 400, "prompt", "context_length_exceeded"),
    (TEXT, {"n": 3, "best_of": 2}, 400, "best_of", "conflicting_parameters"),
    (TEXT, {"best_of": 2, "stream": True}, 400, "best_of", "conflicting_parameters"),
    (TEXT, {"n": 65, "prompt": ["a", "b"]}, 400, "n", "conflicting_parameters"),
    (TEXT, {"best_of": 65, "prompt": ["a", "b"]}, 400, "best_of", "conflicting_parameters"),
    (TEXT, {"best_of": 129}, 400, "best_of", "invalid_value"),
    (TEXT, {"max_tokens": 0}, 400, "max_tokens", "conflicting_parameters"),
    (TEXT, {"logprobs": 21}, 400, "logprobs", "invalid_value"),
    (TEXT, {"prompt_logprobs": 21}, 400, "prompt_logprobs", "invalid_value"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "conflicting_parameters"),
    (TEXT, {"top_logprobs": 2}, 400, "top_logprobs", "unsupported_parameter"),
    (TEXT, {"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
]


@pytest.mark.parametrize(("route", "change", "status", "param", "code"), BAD)
def test_a_bad_parameter_is_named(
    server: ServerThread, route: str, change: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    good = GOOD_CHAT if route == CHAT else GOOD_TEXT
    body = json.dumps({**good, **change})  # NaN and Infinity go out as Python writes them
    answer = httpx.post(server.url + route, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert param is None or param.split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * (limits.MAX_TOKENIZE_CHARACTERS + 1)}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [272]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_a_bad_tokenizer_request_is_named(server: ServerThread, route: str, body: dict[str, Any], param: str) -> None:
    answer = server.post(route, body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_a_bad_request_takes_no_place_and_no_block(server: ServerThread) -> None:
    for route, change, *_ in BAD[::7]:
        server.post(route, {**(GOOD_CHAT if route == CHAT else GOOD_TEXT), **_finite(change)})
    assert server.server.service.admission.in_flight == 0
    assert server.metric("vllm:num_requests_running", model_name="tiny") == 0.0


def _finite(change: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value if value == value and value not in (float("inf"), float("-inf")) else 9e9
        for key, value in change.items()
    }


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"model": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "\\ud800": 1}', 400),
        (b'{"model": "\\ud800", "messages": [{"role": "user", "content": "hi"}]}', 400),
        (b'{"model": "tiny", "prompt": "' + b"x" * limits.MAX_BODY_BYTES + b'"}', 413),
    ],
    ids=lambda value: repr(value)[:24],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_broken_body_is_refused(server: ServerThread, content: bytes, status: int, chunked: bool) -> None:
    payload = (content[at : at + 65536] for at in range(0, len(content), 65536)) if chunked else content
    answer = httpx.post(server.url + CHAT, content=payload, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert answer.json()["error"]["code"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_wrong_method_and_an_unknown_route_get_the_error_object(server: ServerThread, method: str) -> None:
    assert httpx.request(method, server.url + CHAT).json()["error"]["code"] == "method_not_allowed"
    assert httpx.request(method, server.url + "/v2/nothing").json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/health", "GET, HEAD"),
        ("/version", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/v1/models", "GET"),
        ("/v1/models/tiny", "GET"),
        (CHAT, "POST"),
    ],
)
def test_a_wrong_method_is_told_all_that_the_path_has(server: ServerThread, path: str, allowed: str) -> None:
    refused = httpx.request("DELETE", server.url + path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/health/", "/openapi.json/", CHAT + "/", "/tokenize/"])
def test_a_slash_behind_a_route_is_another_route(server: ServerThread, path: str) -> None:
    """It was redirected to `http://` and whatever host the request named, also behind a proxy that speaks TLS."""
    method = "GET" if path in ("/health/", "/openapi.json/") else "POST"
    answer = httpx.request(method, server.url + path, headers={"Host": "evil.example"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_hints_and_nulls_in_a_part_are_accepted(server: ServerThread) -> None:
    answer = server.post(CHAT, GOOD_CHAT | {"messages": [parts(cache_control={"type": "ephemeral"}, annotations=None)]})
    assert answer.status_code == 200, answer.text


def test_null_and_off_values_and_harmless_fields_are_accepted(server: ServerThread) -> None:
    off = {
        "temperature": None,
        "stop": None,
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
    }
    harmless = dict.fromkeys(IGNORED_PARAMETERS, "x")
    answer = server.post(CHAT, {**GOOD_CHAT, **off, **harmless})
    assert answer.status_code == 200, answer.text


VLLM_DEFAULTS: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "detokenize": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "allowed_token_ids": [],
    "bad_words": [],
    "logits_processors": None,
    "truncate_prompt_tokens": None,
    "guided_json": None,
    "prompt_cache_retention": "24h",
}
VLLM_CHAT_DEFAULTS: dict[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "include_reasoning": True,
    "documents": None,
    "chat_template": None,
    "chat_template_kwargs": {},
}


def test_values_of_vllms_parameters_that_ask_for_nothing_are_accepted(server: ServerThread) -> None:
    chat = server.post(CHAT, GOOD_CHAT | VLLM_DEFAULTS | VLLM_CHAT_DEFAULTS)
    assert chat.status_code == 200, chat.text
    text = server.post(TEXT, GOOD_TEXT | VLLM_DEFAULTS | {"add_special_tokens": True})
    assert text.status_code == 200, text.text


VLLM_TOKENIZE_DEFAULTS: dict[str, Any] = {
    "model": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "return_token_strs": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "mm_processor_kwargs": None,
    "tools": None,
}


def test_tokenize_takes_the_defaults_of_vllms_own_clients(server: ServerThread) -> None:
    """And refuses by name what would change the tokens, where the answer was the same without a word."""
    plain = server.post("/tokenize", {"messages": MESSAGES})
    full = server.post("/tokenize", {"messages": MESSAGES, "prompt": None, **VLLM_TOKENIZE_DEFAULTS})
    assert full.status_code == 200, full.text
    assert full.json() == plain.json()
    for name, value in (
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("add_special_tokens", True),
    ):
        refused = server.post("/tokenize", {"messages": MESSAGES, name: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == name
    assert "'prompt': it must be a string; got a list" in server.post("/tokenize", {"prompt": ["hi"]}).text
    whole = {"prompt": "hi", "add_special_tokens": None, "return_token_strs": None}
    assert server.post("/tokenize", whole).json() == server.post("/tokenize", {"prompt": "hi"}).json()


def test_a_refused_value_says_which_is_accepted(server: ServerThread) -> None:
    message = server.post(CHAT, {**GOOD_CHAT, "use_beam_search": True}).json()["error"]["message"]
    assert message == "'use_beam_search' is supported by this server only as false; leave it out."


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/load", "/version"])
def test_a_probe_may_ask_for_the_head_alone(server: ServerThread, path: str) -> None:
    answer = httpx.head(server.url + path, timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 0
