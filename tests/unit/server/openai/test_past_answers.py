"""The second turn of a chat: clients send the assistant's message back as they have it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from millstream_runtime.server.openai.request_fields import PAST_ANSWER_FIELDS
from millstream_runtime.server.openai.requests import ChatCompletionRequest, TokenizeRequest

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HISTORIES: dict[str, dict[str, Any]] = {
    "vLLM": {"reasoning": "so", "reasoning_content": "so", "tool_calls": [], "audio": None, "function_call": None},
    "DeepSeek": {"reasoning_content": "", "tool_calls": None},
    "OpenAI": {"refusal": None, "annotations": [{"type": "url_citation", "url_citation": {}}], "parsed": None},
    "LiteLLM": {
        "provider_specific_fields": {"refusal": None, "citations": [[{}]]},
        "thinking_blocks": [{"type": "thinking", "thinking": "so", "signature": "c2ln"}],
        "function_call": None,
        "tool_calls": None,
    },
    "OpenRouter": {"reasoning": "so", "reasoning_details": [{"type": "reasoning.text", "text": "so"}], "refusal": ""},
    "a choice": {"id": "chatcmpl-1", "index": 0, "finish_reason": "stop", "logprobs": None, "stop_reason": None},
    "SGLang": {"finish_reason": "stop", "matched_stop": 2, "reasoning_content": None},
    "Azure": {"content_filter_results": {"hate": {"filtered": False, "severity": "safe"}}},
    "Groq": {"executed_tools": [{"type": "search", "index": 0}]},
    "Mistral": {"prefix": False},
    "OpenRouter, later": {"images": []},
    "a whole answer": {"id": "1", "object": "x", "created": 1, "model": "m", "usage": {"total_tokens": 3}},
}


def chat(message: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "a"}, message, {"role": "user", "content": "c"}]}


def refused_field(request: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as refused:
        ChatCompletionRequest.model_validate(request)
    (error,) = refused.value.errors()
    return str(error["ctx"]["param"] if "ctx" in error else error["loc"][-1])


@pytest.mark.parametrize("client", HISTORIES)
def test_a_message_of_the_past_is_what_it_says_and_nothing_else(client: str) -> None:
    message = {"role": "assistant", "content": "b"}
    plain = ChatCompletionRequest.model_validate(chat(message))
    request = ChatCompletionRequest.model_validate(chat(message | HISTORIES[client]))
    assert [one.for_template() for one in request.messages] == [one.for_template() for one in plain.messages]
    TokenizeRequest.model_validate({"messages": chat(message | HISTORIES[client])["messages"]})


OUTPUT_TEXT = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
CONTENTS: dict[str, tuple[dict[str, Any], str]] = {
    "reasoning alone": ({"content": None, "reasoning_content": "so"}, ""),
    "reasoning alone, no content": ({"reasoning": "so"}, ""),
    "thinking alone": ({"content": [{"type": "thinking", "thinking": "so", "signature": "c2ln"}]}, ""),
    "thinking and text": ({"content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "b"}]}, "b"),
    "hidden thinking": ({"content": [{"type": "redacted_thinking", "data": "x"}, OUTPUT_TEXT]}, "b"),
    "reasoning and output": ({"content": [{"type": "reasoning", "summary": []}, OUTPUT_TEXT]}, "b"),
    "a refusal": ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
}


@pytest.mark.parametrize("spelling", CONTENTS)
def test_the_text_of_an_answer_is_read_from_its_parts_without_its_reasoning(spelling: str) -> None:
    fields, text = CONTENTS[spelling]
    request = ChatCompletionRequest.model_validate(chat({"role": "assistant", **fields}))
    assert request.messages[1].for_template() == {"role": "assistant", "content": text}
    assert request.messages[1].for_template(as_parts=True)["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": 1}]},
        {"role": "assistant", "content": [{"type": "refusal"}]},
        {"role": "assistant", "content": [{"type": "image_url"}, {"type": "thinking"}]},
        {"role": "assistant", "content": [{"type": ["thinking"]}]},
        {"role": "user", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": None, "reasoning_content": "so"},
    ],
)
def test_a_content_without_text_is_refused_where_it_is_no_reasoning_of_an_answer(message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate(chat(message))


@pytest.mark.parametrize("name", sorted(PAST_ANSWER_FIELDS))
def test_the_field_of_an_answer_is_refused_by_name_in_what_the_user_says(name: str) -> None:
    assert refused_field(chat({"role": "user", "content": "b", name: [1]})) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tool_calls", [CALL]), ("function_call", {"name": "f"}), ("audio", {"id": "1"}), ("refusal", "No.")),
        *(("prefix", True), ("reasonings", "so")),
    ],
)
def test_what_would_change_the_prompt_is_refused_by_name(name: str, value: object) -> None:
    assert refused_field(chat({"role": "assistant", "content": "b", name: value})) == name
