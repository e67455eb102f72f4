"""What the OpenAI routes accept. Nothing is ignored in silence:

  - a parameter that the runtime honours is a typed, capped field below;
  - one that cannot change the answer (`user`, `metadata`, …) is accepted: HARMLESS;
  - one that it does not support yet passes only with the value that means "off", as clients send by default: NEUTRAL;
  - anything else is a 400 that names it.

`null` always means "not given", as in OpenAI's own specification.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from millstream_runtime.server import limits

HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})

_OFF: tuple[object, ...] = (False, 0, [], {}, "none", "auto")
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": _OFF,
    "functions": _OFF,
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": _OFF,
    "tools": ([],),
    "top_logprobs": (0,),
}
MESSAGE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _without_neutral(data: Any, neutral: dict[str, tuple[object, ...]]) -> Any:
    """`data` without nulls, harmless fields and fields set to "off"."""
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        if value is None or name in HARMLESS:
            continue
        if name in neutral:
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in neutral[name]):
                raise PydanticCustomError(
                    "unsupported_parameter", "'{param}' is not supported by this server.", {"param": str(name)[:80]}
                )
            continue
        kept[name] = value
    return kept


def _text_of_parts(content: Any) -> Any:
    """`[{"type": "text", "text": …}, …]` to one string; the parts become lines."""
    if not isinstance(content, list):
        return content
    if not 1 <= len(content) <= limits.MAX_CONTENT_PARTS:
        raise PydanticCustomError("invalid_value", "it must have 1 to {most} parts", {"most": limits.MAX_CONTENT_PARTS})
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise PydanticCustomError(
                "invalid_value", 'it must be a string or a list of {"type": "text", "text": …} parts: text only'
            )
    return "\n".join(part["text"] for part in content)


def _list_of_stops(stop: Any) -> Any:
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and not all(
        isinstance(text, str) and 1 <= len(text) <= limits.MAX_STOP_STRING_CHARACTERS for text in stops
    ):
        raise PydanticCustomError(
            "invalid_value",
            "every stop string must have 1 to {most} characters",
            {"most": limits.MAX_STOP_STRING_CHARACTERS},
        )
    return stops


def _list_of_prompts(prompt: Any) -> Any:
    one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    return [prompt] if one else prompt


def _encodable(text: str) -> str:
    """JSON can spell half of a UTF-16 pair, which is no character and has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_value", "it has a lone surrogate, which is not a character") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=limits.MAX_TOKENS_LIMIT)]
TokenCount = Annotated[int, Field(ge=1, le=limits.MAX_TOKENS_LIMIT)]


class TextPart(BaseModel):
    """One part of a message's content. Only text parts exist here."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. `developer` is OpenAI's newer word for `system`."""

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_text_of_parts, json_schema_input_type=str | list[TextPart])]
    name: Annotated[Text, Field(max_length=256)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return _without_neutral(data, MESSAGE_NEUTRAL)

    def for_template(self) -> dict[str, str]:
        """The mapping that chat templates read."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return {**message, "name": self.name} if self.name else message


class StreamOptions(BaseModel):
    """`include_obfuscation` is accepted: it pads chunks against traffic analysis and never changes the text."""

    model_config = _STRICT
    include_usage: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        return _without_neutral(data, {})


class GenerationRequest(BaseModel):
    """What chats and completions share. Absent sampling fields take the model's generation_config.json, then 1.0."""

    model_config = _STRICT
    model: Annotated[Text, Field(min_length=1, max_length=limits.MAX_MODEL_NAME_CHARACTERS)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS_LIMIT, description="-1 and 0 switch it off")] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        list[Text],
        BeforeValidator(_list_of_stops, json_schema_input_type=str | list[str]),
        Field(max_length=limits.MAX_STOP_STRINGS),
    ] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS)] = []
    min_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS_LIMIT)] = 0
    ignore_eos: bool = False
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return _without_neutral(data, NEUTRAL)

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "'stream_options' needs 'stream': true.")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise conflict("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
        return self

    @property
    def token_limit(self) -> int | None:
        """None: as many as the context allows."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: a plain prompt, several of them, or token ids. Each prompt becomes one choice."""

    prompt: Annotated[
        list[Text] | list[TokenIds],
        BeforeValidator(_list_of_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
        Field(min_length=1, max_length=limits.MAX_PROMPTS),
    ]

    @property
    def token_limit(self) -> int:
        """OpenAI's default for this route is 16."""
        return self.max_tokens or 16


def conflict(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("conflicting_parameters", message, {"param": param})
