"""`chat_template_kwargs`: clients of vLLM and SGLang give variables to the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from millstream_runtime.server.http import limits
from millstream_runtime.tokenizing.chat_template import (
    RESERVED_VARIABLES,
    SPECIAL_TOKEN_NAMES,
    ChatTemplate,
    ChatTemplateError,
)
from tests.support.server_thread import ServerThread, serving
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MESSAGES = [{"role": "user", "content": "hi"}]
# As Qwen3's does it, and a variable that is printed.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{% if persona %}{{ persona | tojson }}{% endif %}{% if depth %}{{ depth + 1 }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("thinking") / "m")
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


@pytest.fixture(scope="module")
def thinker(folder: Path) -> Iterator[ServerThread]:
    with serving(folder) as server:
        yield server.wait_ready()


def tokens(server: ServerThread, **fields: Any) -> list[int]:
    answer = server.post(TOKENIZE, {"messages": MESSAGES, **fields})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


@pytest.mark.parametrize(
    "given",
    [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"persona": {"name": "Ada", "likes": [1, None]}}],
)
def test_the_template_sees_them_as_in_transformers(thinker: ServerThread, folder: Path, given: dict[str, Any]) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False, **given)
    assert tokens(thinker, chat_template_kwargs=given) == expected
    assert (expected != tokens(thinker)) is (given not in ({}, {"enable_thinking": True}))


def test_a_chat_is_generated_from_the_prompt_that_tokenize_shows(thinker: ServerThread) -> None:
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none")
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, extra_body=given)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens(thinker, **given)) != len(tokens(thinker))


def test_null_and_nothing_are_as_if_they_were_left_out(thinker: ServerThread) -> None:
    plain = tokens(thinker)
    assert tokens(thinker, chat_template_kwargs=None) == tokens(thinker, chat_template_kwargs={}) == plain
    assert tokens(thinker, chat_template_kwargs={"enable_thinking": None, "unknown_to_the_template": 1}) == plain


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_what_the_server_gives_to_the_template_is_refused_by_name(thinker: ServerThread, path: str, name: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False, name: False}}
    answer = thinker.post(path, body)
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        {
            "message": f"'chat_template_kwargs.{name}' is what the server itself gives to the chat template; leave it "
            "out.",
            "type": "invalid_request_error",
            "param": f"chat_template_kwargs.{name}",
            "code": "conflicting_parameters",
        },
    )


def nested(levels: int) -> Any:
    return [] if levels == 0 else [nested(levels - 1)]


LARGEST = limits.MAX_TEMPLATE_NUMBER
# (what is given, what the message says)
BAD: list[tuple[Any, str]] = [
    ([], "it must be an object; got an empty list"),
    ("enable_thinking", "it must be an object; got 'enable_thinking'"),
    (True, "it must be an object; got true"),
    ({"": 1}, "every name must be a letter and up to 63 letters, digits and underscores"),
    ({"_name": 1}, "every name must be a letter"),
    ({"a b": 1}, "every name must be a letter"),
    ({"x\n": 1}, "every name must be a letter"),
    ({"x" * 65: 1}, "every name must be a letter"),
    ({"\ud800": 1}, "every name must be a letter"),
    ({f"x{i}": 1 for i in range(65)}, "it has 65 names; at most 64 are taken"),
    ({"x": nested(7)}, "it is nested deeper than 8 levels"),
    ({"x": nested(500)}, "it is nested deeper than 8 levels"),
    ({"x": [0] * 1024}, "it has more than 1024 values"),
    ({"x": [[0] * 512, [0] * 512]}, "it has more than 1024 values"),
    ({"x": {str(i): 0 for i in range(2000)}}, "it has more than 1024 values"),
    ({"x": "a" * (limits.MAX_TEMPLATE_CHARACTERS + 1)}, "its texts and names have more than 65536 characters"),
    ({"x": {"a" * 70_000: 1}}, "its texts and names have more than 65536 characters"),
    ({"x": "\ud800"}, "it has a lone surrogate"),
    ({"x": {"\ud800": 1}}, "it has a lone surrogate"),
    ({"x": LARGEST + 1}, f"every number must be from -{LARGEST} to {LARGEST}"),
    ({"x": [-1e300]}, "every number must be"),
    ({"x": float("nan")}, "every number must be"),
    ({"x": float("inf")}, "every number must be"),
    ({"x": 10**400}, "every number must be"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
def test_more_than_the_caps_allow_is_refused(thinker: ServerThread, path: str, given: Any, message: str) -> None:
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": given})  # NaN as Python writes it
    answer = httpx.post(thinker.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "chat_template_kwargs", "invalid_value")
    assert message in error["message"]
    assert thinker.get("/ready").status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        {"x" * 64: 1},
        {f"x{i}": 1 for i in range(64)},
        {"x": nested(6)},
        {"x": [0] * 1023},
        {"x": "a" * (limits.MAX_TEMPLATE_CHARACTERS - 1)},
        {"x": LARGEST, "y": -float(LARGEST), "z": 0.5, "flag": True, "nothing": None},
    ],
)
def test_as_much_as_the_caps_allow_is_taken(thinker: ServerThread, given: dict[str, Any]) -> None:
    assert tokens(thinker, chat_template_kwargs=given) == tokens(thinker)


def test_the_api_document_has_the_caps_and_the_names(thinker: ServerThread) -> None:
    schemas = thinker.get("/openapi.json").json()["components"]["schemas"]
    for request in ("ChatCompletionRequest", "TokenizeRequest"):
        described = schemas[request]["properties"]["chat_template_kwargs"]
        assert (described["type"], described["maxProperties"]) == ("object", limits.MAX_TEMPLATE_KWARGS)
        assert set(described["propertyNames"]["not"]["enum"]) == RESERVED_VARIABLES
        assert str(limits.MAX_TEMPLATE_CHARACTERS) in described["description"]


def test_plain_prompts_have_no_template(thinker: ServerThread) -> None:
    for path, code in ((TEXT, "unknown_parameter"), (TOKENIZE, "conflicting_parameters")):
        body = {"model": "tiny", "prompt": "hi", "chat_template_kwargs": {"enable_thinking": False}}
        error = thinker.post(path, body).json()["error"]
        assert (error["param"], error["code"]) == ("chat_template_kwargs", code)


def test_values_that_the_template_cannot_use_are_a_400(thinker: ServerThread) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"depth": "three"}}
    answer = thinker.post(CHAT, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_messages")
    assert answer.json()["error"]["message"] == (
        "The model's chat template cannot render these messages with these chat_template_kwargs."
    )


def test_every_variable_of_the_servers_own_is_reserved() -> None:
    own = ChatTemplate("", dict.fromkeys(SPECIAL_TOKEN_NAMES, "x"))._constants
    assert {*own, "messages"} <= RESERVED_VARIABLES
    source = "{{ tools }} {{ bos_token }} {{ messages | length }} {{ range(1) | list }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    given = {"tools": 1, "bos_token": 2, "messages": [], "range": 3}
    assert template.render(MESSAGES, given) == "None <s> 1 [0]", "even if they were not refused before"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("{{ words.append(1) }}", {"words": ["a"]}),
        ("{{ options.update(a=1) }}", {"options": {}}),
        ("{{ text.format(messages) }}", {"text": "{0.__class__.__mro__}"}),
        ("{{ text[name].__mro__ }}", {"text": "x", "name": "__class__"}),
        ("{{ (text | attr(name)).__mro__ }}", {"text": "x", "name": "__class__"}),
        ("{{ text % messages }}", {"text": "%d"}),
    ],
)
def test_values_of_a_client_do_not_lead_out_of_the_sandbox(source: str, given: dict[str, Any]) -> None:
    before = json.dumps(given)
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(MESSAGES, given)
    assert json.dumps(given) == before
