"""Types and validators of request fields, and the parameters that are accepted without being supported."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, FailFast, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import shown_value

IGNORED_PARAMETERS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
PART_PARAMETERS = frozenset({"type", "text", "cache_control"})  # the last is a hint for caches of other servers

_OFF: tuple[object, ...] = (False, 0, [], {}, "none", "auto")
OFF_VALUES: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": _OFF,
    "functions": _OFF,
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": _OFF,
    "tools": ([],),
}
# vLLM's parameters, with the values that ask for what this server does anyway; its clients send them by default.
VLLM_OFF_VALUES: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "detokenize": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # of special tokens, which are skipped
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern", "kv_transfer_params"), ()),
    "thinking_token_budget": (),
}
SGLANG_OFF_VALUES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("regex", "ebnf", "json_schema", "lora_path", "custom_logit_processor", "custom_params"), ()),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (False,),
    "stop_regex": ([],),
    "stream_reasoning": (True, False),  # of reasoning that is separated
}
OFF_VALUES |= VLLM_OFF_VALUES | SGLANG_OFF_VALUES
CHAT_OFF_VALUES = OFF_VALUES | {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "documents": ([],),
    "include_reasoning": (True, False),  # no model here has any
    "mm_processor_kwargs": ({},),
    "verbosity": ("medium",),
}
CHAT_OFF_VALUES |= {"best_of": (1,), "echo": (False,), "prompt_logprobs": ()}
COMPLETION_OFF_VALUES = OFF_VALUES | {"add_special_tokens": (True,), "top_logprobs": (0,)}
TOKENIZE_CHAT_OFF_VALUES: dict[str, tuple[object, ...]] = {
    name: CHAT_OFF_VALUES[name]
    for name in (
        *("add_generation_prompt", "add_special_tokens", "continue_final_message", "mm_processor_kwargs", "tools"),
    )
}
# What an assistant's message carries when a client sends it back as it came: it is no part of the prompt.
PAST_ANSWER_FIELDS = frozenset(
    {
        *("id", "object", "created", "model", "index", "finish_reason", "stop_reason", "matched_stop", "logprobs"),
        *("usage", "status", "annotations", "citations", "parsed"),
        *("reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks"),
        *("provider_specific_fields", "extra_content", "token_ids", "prompt_token_ids"),
        *("content_filter_results", "executed_tools", "created_at", "weight"),
    }
)
# ... and fields that may stand there without a content: it is empty then.
REASONING_FIELDS = ("reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks")
# Parts of an assistant's content that are its text, with the field that has it; and those that no prompt shows.
TEXT_FIELD_OF_PAST_PART = {"output_text": "text", "refusal": "refusal"}
REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
MESSAGE_OFF_VALUES: dict[str, tuple[object, ...]] = {
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "images": ([],),
    "prefix": (False,),
}


def without_unsupported(data: Any, off_values: dict[str, tuple[object, ...]]) -> Any:
    """Return `data` without nulls, ignored parameters, and unsupported ones whose value means "off"."""
    if not isinstance(data, dict):
        return data
    if len(data) > limits.MAX_FIELDS:
        raise PydanticCustomError(
            "too_many_fields",
            "it has {count} fields; at most {most} are read",
            {"count": len(data), "most": limits.MAX_FIELDS},
        )
    kept = {}
    for name, value in data.items():
        if value is None or name in IGNORED_PARAMETERS:
            continue
        if name in off_values:
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in off_values[name]):
                accepted = " or ".join(json.dumps(off) for off in off_values[name])
                raise PydanticCustomError(
                    "unsupported_parameter", "not supported", {"param": name, "accepted": accepted or "null"}
                )
            continue
        kept[name] = value
    return kept


def message_fields(data: Any) -> Any:
    """Return a message without what `without_unsupported` drops, and an assistant's without PAST_ANSWER_FIELDS."""
    if _is_answer(data) and len(data) <= limits.MAX_FIELDS:
        content = _past_content(data)
        data = {name: value for name, value in data.items() if name not in PAST_ANSWER_FIELDS}
        data |= {} if content is None else {"content": content}
    return without_unsupported(data, MESSAGE_OFF_VALUES)


def _is_answer(data: Any) -> bool:
    return isinstance(data, dict) and data.get("role") == "assistant"


def _past_content(answer: dict[str, Any]) -> Any:
    """The content of an assistant's message: parts as text parts and without reasoning; None: it has none."""
    content = answer.get("content")
    if content is None:
        return "" if any(answer.get(name) is not None for name in REASONING_FIELDS) else None
    if not isinstance(content, list) or len(content) > limits.MAX_CONTENT_PARTS:
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    is_reasoning = [isinstance(kind, str) and kind in REASONING_PARTS for kind in kinds]
    if content and all(is_reasoning):
        return ""
    parts = zip(content, kinds, is_reasoning, strict=True)
    return [_past_part(part, kind) for part, kind, is_left_out in parts if not is_left_out]


def _past_part(part: Any, kind: object) -> Any:
    """A part as a text part; unchanged where its type is another one."""
    field = TEXT_FIELD_OF_PAST_PART.get(kind) if isinstance(kind, str) else None
    return part if field is None else {"type": "text", "text": part.get(field)}


def text_of_parts(content: Any) -> Any:
    """Join `[{"type": "text", "text": …}, …]` to one string; the parts become lines. A further field is refused."""
    if not isinstance(content, list):
        return content
    if not 1 <= len(content) <= limits.MAX_CONTENT_PARTS:
        raise PydanticCustomError("invalid_value", "it must have 1 to {most} parts", {"most": limits.MAX_CONTENT_PARTS})
    for number, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise PydanticCustomError(
                "invalid_value", 'it must be a string or a list of {"type": "text", "text": …} parts: text only'
            )
        unknown = next(
            (name for name, value in part.items() if name not in PART_PARAMETERS and value is not None), None
        )
        if unknown is not None:
            name = unknown[:80].encode("ascii", "backslashreplace").decode()  # pydantic takes no lone surrogates
            raise PydanticCustomError("unknown_parameter", "unknown", {"param": f"{number}.{name}"})
    return "\n".join(part["text"] for part in content)


def list_of_stops(stop: Any) -> Any:
    stops = [stop] if isinstance(stop, str) else stop
    for text in stops if isinstance(stops, list) else ():
        if not isinstance(text, str):
            raise PydanticCustomError(
                "invalid_value", "every entry must be a string; got {shown}", {"shown": shown_value(text)}
            )
        if not 1 <= len(text) <= limits.MAX_STOP_STRING_CHARACTERS:
            counts = {"most": limits.MAX_STOP_STRING_CHARACTERS, "count": len(text)}
            raise PydanticCustomError(
                "invalid_value", "every stop string must have 1 to {most} characters; one has {count}", counts
            )
    return stops


def bias_by_id(bias: Any) -> Any:
    """Convert `{"token id": number}`, as JSON has it, to integer ids."""
    if not isinstance(bias, dict):
        return bias
    if len(bias) > limits.MAX_LOGIT_BIAS_ENTRIES:
        raise PydanticCustomError(
            "invalid_value", "it must have at most {most} entries", {"most": limits.MAX_LOGIT_BIAS_ENTRIES}
        )
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise PydanticCustomError(
                "invalid_value",
                "every key must be a token id in decimal digits; got {shown}",
                {"shown": shown_value(key)},
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not -100 <= value <= 100:  # NaN is in no range
            raise PydanticCustomError(
                "invalid_value",
                "every value must be a number from -100 to 100; got {shown} for {key}",
                {"shown": shown_value(value), "key": key},
            )
        by_id[int(key)] = float(value)
    return by_id


def list_of_prompts(prompt: Any) -> Any:
    """Make one prompt a list. Too many are refused here: pydantic would first collect the errors of a million."""
    one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    prompts = [prompt] if one else prompt
    if isinstance(prompts, list) and len(prompts) > limits.MAX_PROMPTS:
        counts = {"max_length": limits.MAX_PROMPTS, "actual_length": len(prompts)}
        raise PydanticKnownError("too_long", {"field_type": "List", **counts})
    return prompts


def require_encodable(text: str) -> str:
    """JSON can write half of a UTF-16 pair, which is no character and has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_value", "it has a lone surrogate, which is not a character") from None
    return text


def require_tokenizable(text: str) -> str:
    """Cap the length of a text that is only tokenised; the prompt of a generation is limited by the context."""
    if len(text) > limits.MAX_TOKENIZE_CHARACTERS:
        raise PydanticCustomError(
            "invalid_value",
            "it has {count} characters, and at most {most} are tokenised at once; send the text in pieces",
            {"count": len(text), "most": limits.MAX_TOKENIZE_CHARACTERS},
        )
    return text


# What the validators above accept, in the words of JSON Schema.
TOKENIZE_PROMPT_SCHEMA = {"type": "string", "maxLength": limits.MAX_TOKENIZE_CHARACTERS}
_STOP = {"type": "string", "minLength": 1, "maxLength": limits.MAX_STOP_STRING_CHARACTERS}
STOP_SCHEMA = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": limits.MAX_STOP_STRINGS}]}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 31}, "minItems": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": limits.MAX_PROMPTS}
PROMPT_SCHEMA = {"anyOf": [_TEXT, {**_SEVERAL, "items": _TEXT}, _IDS, {**_SEVERAL, "items": _IDS}]}
LOGIT_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": limits.MAX_LOGIT_BIAS_ENTRIES,
}
Text = Annotated[str, AfterValidator(require_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=limits.MAX_TOKENS_LIMIT), FailFast()]
TopLogprobs = Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1, le=limits.MAX_TOKENS_LIMIT)]


def conflict(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("conflicting_parameters", message, {"param": param})
