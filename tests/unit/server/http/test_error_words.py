"""What a refused request is answered: one sentence that names the parameter, in words of JSON."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from millstream_runtime.server.openai.sampling import context_length_exceeded
from tests.support.server_thread import ServerThread

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD_CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}
GOOD_TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
MESSAGE = 'an object such as {"role": "user", "content": "Hello"}'


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("guided_json", {"type": "object"}, "null"),
        ("guided_choice", ["yes", "no"], "null"),
        ("structured_outputs", {"choice": ["yes", "no"]}, "null"),
        ("regex", "[ab]", "null"),
        ("ebnf", "root ::= [ab]", "null"),
        ("lora_path", "adapter", "null"),
        ("separate_reasoning", True, "false"),
        ("return_hidden_states", True, "false"),
    ],
)
def test_what_vllm_and_sglang_have_and_this_server_has_not_is_refused_as_such(
    server: ServerThread, path: str, name: str, value: Any, accepted: str
) -> None:
    """It was an unknown parameter, as a spelling mistake is."""
    good = GOOD_CHAT if path == CHAT else GOOD_TEXT
    error = server.post(path, good | {name: value}).json()["error"]
    assert error["message"] == f"'{name}' is supported by this server only as {accepted}; leave it out."
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert server.post(path, good | {name: json.loads(accepted)}).status_code == 200


@pytest.mark.parametrize("name", ["enable_thinking", "thinking", "thinking_budget"])
def test_a_variable_of_the_template_is_sent_to_its_place(server: ServerThread, name: str) -> None:
    error = server.post(CHAT, GOOD_CHAT | {name: False}).json()["error"]
    hint = "Variables of the chat template go into 'chat_template_kwargs' of a chat."
    assert error["message"] == f"Unknown parameter: '{name}'. {hint}"
    assert (error["param"], error["code"]) == (name, "unknown_parameter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": [1]}, f"Invalid 'messages.0': it must be {MESSAGE}; got 1."),
        ({"messages": ["hi"]}, f"Invalid 'messages.0': it must be {MESSAGE}; got 'hi'."),
        ({"messages": [*MESSAGES, []]}, f"Invalid 'messages.1': it must be {MESSAGE}; got an empty list."),
        ({"messages": "hi"}, "Invalid 'messages': it must be a list; got 'hi'."),
        ({"messages": {"role": "user"}}, "Invalid 'messages': it must be a list; got an object."),
        ({"max_tokens": "7"}, "Invalid 'max_tokens': it must be an integer; got '7'."),
        ({"max_tokens": 0}, "Invalid 'max_tokens': it must be from 1 to 1048576; got 0."),
        ({"repetition_penalty": 1e-39}, "Invalid 'repetition_penalty': it must be from 0.01 to 10; got 1e-39."),
        ({"temperature": 2.5}, "Invalid 'temperature': it must be from 0 to 2; got 2.5."),
        ({"top_k": -2}, "Invalid 'top_k': it must be from -1 to 1048576; got -2."),
        ({"stop_token_ids": [5, -1]}, "Invalid 'stop_token_ids.1': it must be at least 0; got -1."),
        ({"temperature": "hot"}, "Invalid 'temperature': it must be a number; got 'hot'."),
        ({"seed": 1 << 63}, f"Invalid 'seed': it must be from {-(1 << 63)} to {(1 << 63) - 1}; got {1 << 63}."),
        ({"stop": ["a", 1]}, "Invalid 'stop': every entry must be a string; got 1."),
        ({"stop": ""}, "Invalid 'stop': every stop string must have 1 to 256 characters; one has 0."),
        ({"logit_bias": {"x": 1}}, "Invalid 'logit_bias': every key must be a token id in decimal digits; got 'x'."),
        (
            {"logit_bias": {"5": 101}},
            "Invalid 'logit_bias': every value must be a number from -100 to 100; got 101 for 5.",
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "Invalid 'messages.0.role': it must be 'system', 'developer', 'user' or 'assistant'; got 'tool'.",
        ),
        ({"stream": "yes"}, "Invalid 'stream': it must be true or false; got 'yes'."),
        ({"stream": True, "stream_options": 1}, "Invalid 'stream_options': it must be an object; got 1."),
        ({"logit_bias": [1]}, "Invalid 'logit_bias': it must be an object; got a list."),
        ({"messages": [{"role": "user", "content": 3}]}, "Invalid 'messages.0.content': it must be a string; got 3."),
    ],
)
def test_a_value_of_another_type_is_named_in_the_words_of_json(
    server: ServerThread, change: dict[str, Any], message: str
) -> None:
    assert server.post(CHAT, GOOD_CHAT | change).json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (TEXT, {"prompt": ["a"] * 65}, "Invalid 'prompt': it may have at most 64 entries, and has 65."),
        (TEXT, {"prompt": []}, "Invalid 'prompt': it is empty."),
        (CHAT, {"stop": ["x"] * 17}, "Invalid 'stop': it may have at most 16 entries, and has 17."),
        (CHAT, {"messages": []}, "Invalid 'messages': it is empty."),
        (
            CHAT,
            {"messages": [{**MESSAGES[0], "name": "x" * 257}]},
            "Invalid 'messages.0.name': it may have at most 256 characters, and has 257.",
        ),
        (CHAT, {"cache_salt": ""}, "Invalid 'cache_salt': it is empty."),
        (CHAT, {"cache_salt": "x" * 257}, "Invalid 'cache_salt': it may have at most 256 characters, and has 257."),
    ],
)
def test_a_wrong_length_is_named(server: ServerThread, path: str, change: dict[str, Any], message: str) -> None:
    """`prompt` and `stop` were called of the wrong type."""
    answer = server.post(path, {**(GOOD_CHAT if path == CHAT else GOOD_TEXT), **change})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def error_of(server: ServerThread, body: bytes) -> Any:
    answer = httpx.post(server.url + TEXT, content=body, headers={"content-type": "application/json"}, timeout=60)
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"model": "tiny", "prompt": "a\x00b"}', "Invalid control character at character 30"),
        (b'{"model": "tiny"}{}', "Extra data at character 17"),
        (b'{"model": "tiny"', "Expecting ',' delimiter at character 16"),
        (b"[" * 100_000, "its lists or objects are nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"model": "\xff"}', "it is not UTF-8"),
    ],
)
def test_a_body_that_cannot_be_read_says_why(server: ServerThread, body: bytes, message: str) -> None:
    assert error_of(server, body)["message"] == f"The request body is not valid JSON: {message}."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"temperature": 1e999}', "Invalid 'temperature': it must be a finite number; got inf."),
        (
            b'{"prompt": ["a", "b"], "n": 65}',
            "'n' (65) times the prompts (2) is more than 128 answers; send several req",
        ),
        (b'{"prompt": "a", "n": 3, "best_of": 2}', "'best_of' is 2; it must be at least 'n' (3)."),
    ],
)
def test_the_wrong_number_is_named(server: ServerThread, body: bytes, message: str) -> None:
    model = b'{"model": "tiny", "max_tokens": 1, "prompt": "a", '
    assert error_of(server, body.replace(b"{", model, 1))["message"].startswith(message)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            {"Content-Type": "application/x-www-form-urlencoded"},
            "The request's Content-Type is 'application/x-www-form-urlencoded'; send a JSON object, with Content-Type: "
            "application/json.",
        ),
        ({}, "The request has no Content-Type; send a JSON object, with Content-Type: application/json."),
    ],
)
def test_a_body_of_another_type_is_called_so(server: ServerThread, headers: dict[str, str], message: str) -> None:
    """As of `curl -d` without a header."""
    answer = httpx.post(server.url + TEXT, content=json.dumps(GOOD_TEXT), headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_compressed_body_is_called_so(server: ServerThread) -> None:
    """It was called no UTF-8."""
    body = gzip.compress(json.dumps(GOOD_TEXT).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    error = httpx.post(server.url + TEXT, content=body, headers=headers, timeout=60).json()["error"]
    assert error["message"] == "The request body has the Content-Encoding 'gzip', which this server does not decode."
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("\ud800", "Invalid 'prompt': it has a lone surrogate, which is not a character."),
        (["a", "\ud800"], "Invalid 'prompt': it has a lone surrogate, which is not a character."),
    ],
)
def test_a_prompt_is_named_without_the_words_of_the_validator(server: ServerThread, prompt: Any, message: str) -> None:
    error = error_of(server, json.dumps({**GOOD_TEXT, "prompt": prompt}).encode())
    assert (error["message"], error["param"]) == (message, "prompt")


def test_a_prompt_as_long_as_the_context_is_told_why_it_does_not_fit() -> None:
    """512 tokens and 0 for the answer seem to fit into 512."""
    message = context_length_exceeded("prompt", "512", 0, 512).message
    assert message.endswith("the request has 512 in 'prompt'. Shorten the prompt: an answer needs a token.")
    assert context_length_exceeded("prompt", "512", 1, 512).message.endswith(
        "the request has 512 in 'prompt' and 1 for the answer. Shorten the prompt or lower the token limit."
    )


def test_a_name_that_is_no_text_is_called_so(server: ServerThread) -> None:
    error = error_of(server, json.dumps({**GOOD_TEXT, "\ud800": 1}).encode())
    assert error["message"] == "A parameter's name has a lone surrogate, which is not a character."


def test_a_long_unknown_name_is_not_sent_back_whole(server: ServerThread) -> None:
    answer = server.post(TEXT, {**GOOD_TEXT, "x" * 50_000: 1})
    assert answer.json()["error"]["param"] == "x" * 80
    assert len(answer.content) < 500
