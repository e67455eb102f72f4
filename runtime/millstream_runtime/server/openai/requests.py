"""What the OpenAI routes accept. Nothing is ignored in silence:

  - a parameter that the runtime honours is a typed, capped field below;
  - one that cannot change the answer (`user`, `metadata`, …) is accepted: HARMLESS;
  - one that it does not support yet passes only with the value that means "off", as clients send by default: NEUTRAL;
  - anything else is a 400 that names it.

`null` always means "not given", as in OpenAI's own specification.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from millstream_runtime.server.http import limits

HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})

_OFF: tuple[object, ...] = (False, 0, [], {}, "none", "auto")
NEUTRAL: dict[str, tuple[object, ...]] = {
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
CHAT_NEUTRAL = NEUTRAL | {"best_of": (1,), "echo": (False,), "prompt_logprobs": ()}
COMPLETION_NEUTRAL = NEUTRAL | {"top_logprobs": (0,)}
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
    if len(data) > limits.MAX_FIELDS:
        raise PydanticCustomError(
            "too_many_fields",
            "it has {count} fields; at most {most} are read",
            {"count": len(data), "most": limits.MAX_FIELDS},
        )
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


def _bias_by_id(bias: Any) -> Any:
    """`{"token id": number}`, as JSON must write it, to ids and numbers."""
    if not isinstance(bias, dict):
        return bias
    if len(bias) > limits.MAX_LOGIT_BIAS_ENTRIES:
        raise PydanticCustomError(
            "invalid_value", "it must have at most {most} entries", {"most": limits.MAX_LOGIT_BIAS_ENTRIES}
        )
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise PydanticCustomError("invalid_value", "every key must be a token id in decimal digits")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not -100 <= value <= 100:
            raise PydanticCustomError("invalid_value", "every value must be a number from -100 to 100")
        by_id[int(key)] = float(value)
    return by_id


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


def _tokenisable(text: str) -> str:
    """A generation's prompt is refused by the context of the model; what is only to be counted has a cap of its own."""
    if len(text) > limits.MAX_TOKENIZE_CHARACTERS:
        raise PydanticCustomError(
            "invalid_value",
            "it has {count} characters, and at most {most} are tokenised at once; send the text in pieces",
            {"count": len(text), "most": limits.MAX_TOKENIZE_CHARACTERS},
        )
    return text


TOKENIZE_PROMPT_SCHEMA = {"type": "string", "maxLength": limits.MAX_TOKENIZE_CHARACTERS}
Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=limits.MAX_TOKENS_LIMIT), FailFast()]
TopLogprobs = Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
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
    """What chats and completions share. Absent sampling fields take generation_config.json's, then the API's values."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = NEUTRAL

    model_config = _STRICT
    model: Annotated[Text, Field(min_length=1, max_length=limits.MAX_MODEL_NAME_CHARACTERS)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS_LIMIT, description="-1 and 0 switch it off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias_by_id, json_schema_input_type=dict[str, float])] = (
        Field(default_factory=dict)
    )
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        list[Text],
        BeforeValidator(_list_of_stops, json_schema_input_type=str | list[str]),
        Field(max_length=limits.MAX_STOP_STRINGS),
    ] = Field(default_factory=list)  # pydantic would copy a list deeply for every request
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    min_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS_LIMIT)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] = 1
    priority: Annotated[
        int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY, description="lower is served earlier")
    ] = 0
    cache_salt: (
        Annotated[
            Text,
            Field(
                min_length=1,
                max_length=limits.MAX_CACHE_SALT_CHARACTERS,
                description="share cached prefixes with requests of the same salt only",
            ),
        ]
        | None
    ) = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        return _without_neutral(data, cls.neutral)

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

    neutral: ClassVar[dict[str, tuple[object, ...]]] = CHAT_NEUTRAL

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatCompletionRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise conflict("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
        return self

    @property
    def token_limit(self) -> int | None:
        """None: the model's default, else as many as the context allows."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_candidates(self) -> int:
        """Answers to generate for a prompt."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """A chat does not offer them."""
        return None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: a plain prompt, several of them, or token ids. Each prompt has `n` choices."""

    neutral: ClassVar[dict[str, tuple[object, ...]]] = COMPLETION_NEUTRAL

    prompt: Annotated[
        list[Text] | list[TokenIds],
        BeforeValidator(_list_of_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
        Field(min_length=1, max_length=limits.MAX_PROMPTS),
    ]
    max_tokens: (
        Annotated[int, Field(ge=0, le=limits.MAX_TOKENS_LIMIT, description="0 only scores the prompt")] | None
    ) = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_CHOICES)] | None = None
    echo: bool = False
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        if self.num_candidates * len(self.prompt) > limits.MAX_CHOICES:
            raise conflict("n", f"'n' (or 'best_of') times the prompts is more than {limits.MAX_CHOICES} answers.")
        if self.best_of is not None and self.best_of < self.n:
            raise conflict("best_of", "'best_of' must be at least 'n'.")
        if self.stream and self.num_candidates > self.n:
            raise conflict("best_of", "'best_of' above 'n' cannot be streamed: the best is known at the end only.")
        if self.stream and self.prompt_logprobs is not None:
            raise conflict("prompt_logprobs", "'prompt_logprobs' cannot be streamed.")
        if self.max_tokens == 0 and self.num_prompt_logprobs is None and not self.echo:
            raise conflict("max_tokens", "'max_tokens' 0 asks for nothing; it needs 'echo' or 'prompt_logprobs'.")
        return self

    @property
    def token_limit(self) -> int | None:
        """None: the model's default, else OpenAI's for this route, 16."""
        return self.max_tokens

    @property
    def num_candidates(self) -> int:
        """Answers to generate for a prompt, of which the `n` best are shown."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each token; None: no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt, which an echo shows too."""
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(asked, default=None)


class TokenizeRequest(BaseModel):
    """POST /tokenize (vLLM's route): a plain prompt or a conversation."""

    model_config = _STRICT
    model: Annotated[Text, Field(max_length=limits.MAX_MODEL_NAME_CHARACTERS)] | None = None
    prompt: Annotated[Text, AfterValidator(_tokenisable), WithJsonSchema(TOKENIZE_PROMPT_SCHEMA)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise conflict("prompt", "Give either 'prompt' or 'messages'.")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize (vLLM's route)."""

    model_config = _STRICT
    model: Annotated[Text, Field(max_length=limits.MAX_MODEL_NAME_CHARACTERS)] | None = None
    tokens: TokenIds


def conflict(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("conflicting_parameters", message, {"param": param})
