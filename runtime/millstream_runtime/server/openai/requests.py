"""The requests that the OpenAI routes accept. No parameter is ignored silently:

  - a parameter that the runtime supports is a typed, capped field below;
  - one that cannot change the answer (`user`, `metadata`, …) is accepted: IGNORED_PARAMETERS;
  - an unsupported one is accepted only with a value that means "off", as clients send by default: OFF_VALUES;
  - anything else is a 400 that names it.

`null` always means "not given", as in OpenAI's own specification.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from millstream_runtime.server.http import limits
from millstream_runtime.server.openai.request_fields import (
    CHAT_OFF_VALUES,
    COMPLETION_OFF_VALUES,
    LOGIT_BIAS_SCHEMA,
    OFF_VALUES,
    PROMPT_SCHEMA,
    STOP_SCHEMA,
    TOKENIZE_CHAT_OFF_VALUES,
    TOKENIZE_PROMPT_SCHEMA,
    Penalty,
    Text,
    TokenCount,
    TokenId,
    TokenIds,
    TopLogprobs,
    bias_by_id,
    conflict,
    list_of_prompts,
    list_of_stops,
    message_fields,
    require_tokenizable,
    text_of_parts,
    without_unsupported,
)
from millstream_runtime.server.openai.template_kwargs import TemplateKwargs

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(BaseModel):
    """One part of a message's content. Only text parts exist here. For /openapi.json: `text_of_parts` reads them."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str
    cache_control: Annotated[Any, Field(description="a hint for caches of other servers; ignored")] = None


class Message(BaseModel):
    """One turn. `developer` is OpenAI's newer word for `system`."""

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(text_of_parts, json_schema_input_type=str | list[TextPart])]
    name: Annotated[Text, Field(max_length=256)] | None = None
    _parts: tuple[str, ...] = PrivateAttr(())  # of a content that was a list

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler[Message]) -> Message:
        read = message_fields(data)
        message = handler(read)
        content = read.get("content") if isinstance(read, dict) else None
        if isinstance(content, list):
            message._parts = tuple(part["text"] for part in content)
        return message

    def for_template(self, as_parts: bool = False) -> dict[str, Any]:
        """The mapping that chat templates read. `as_parts`: the content as a list of the parts that the client sent."""
        content = [{"type": "text", "text": text} for text in self._parts or (self.content,)]
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if as_parts else self.content,
        }
        return {**message, "name": self.name} if self.name else message


# A wrong message has up to MAX_FIELDS errors, and one of them is shown.
Messages = Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]


class StreamOptions(BaseModel):
    """`include_obfuscation` is accepted: it pads chunks against traffic analysis and never changes the text.

    `continuous_usage_stats` is vLLM's, and as there it needs `include_usage`.
    """

    model_config = _STRICT
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, Field(description="the usage so far in each chunk")] = False
    include_obfuscation: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return without_unsupported(data, {})


class StreamedUsage(Enum):
    """Which chunks of a stream carry a usage object."""

    NONE = auto()
    LAST_CHUNK = auto()
    EVERY_CHUNK = auto()


class GenerationRequest(BaseModel):
    """The fields that chats and completions share. Absent sampling fields take the model's defaults."""

    off_values: ClassVar[dict[str, tuple[object, ...]]] = OFF_VALUES

    model_config = _STRICT
    model: Annotated[Text, Field(min_length=1, max_length=limits.MAX_MODEL_NAME_CHARACTERS)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS_LIMIT, description="-1 and 0 switch it off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(bias_by_id), WithJsonSchema(LOGIT_BIAS_SCHEMA)] = Field(
        default_factory=dict
    )
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Annotated[
        list[Text],
        BeforeValidator(list_of_stops),
        Field(max_length=limits.MAX_STOP_STRINGS),
        WithJsonSchema(STOP_SCHEMA),
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
    def _drop_unsupported(cls, data: Any) -> Any:
        return without_unsupported(data, cls.off_values)

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "'stream_options' needs 'stream': true.")
        return self

    @property
    def streamed_usage(self) -> StreamedUsage:
        """Which chunks of a stream carry a usage object."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return StreamedUsage.NONE
        return StreamedUsage.EVERY_CHUNK if options.continuous_usage_stats else StreamedUsage.LAST_CHUNK


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    off_values: ClassVar[dict[str, tuple[object, ...]]] = CHAT_OFF_VALUES

    messages: Messages
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
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
        """Answers to generate per prompt."""
        return self.n

    @property
    def count_param(self) -> str:
        """The field that says how many answers are generated per prompt."""
        return "n"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Always None: chats have none."""
        return None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: a plain prompt, several of them, or token ids. Each prompt has `n` choices."""

    off_values: ClassVar[dict[str, tuple[object, ...]]] = COMPLETION_OFF_VALUES

    prompt: Annotated[
        list[Text] | list[TokenIds],
        BeforeValidator(list_of_prompts),
        Field(min_length=1, max_length=limits.MAX_PROMPTS),
        WithJsonSchema(PROMPT_SCHEMA),
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
            param = self.count_param
            count = f"'{param}' ({self.num_candidates}) times the prompts ({len(self.prompt)})"
            raise conflict(param, f"{count} is more than {limits.MAX_CHOICES} answers; send several requests.")
        if self.best_of is not None and self.best_of < self.n:
            raise conflict("best_of", f"'best_of' is {self.best_of}; it must be at least 'n' ({self.n}).")
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
        """Answers to generate per prompt, of which the `n` best are returned."""
        return self.best_of or self.n

    @property
    def count_param(self) -> str:
        """The field that says how many answers are generated per prompt."""
        return "best_of" if self.best_of is not None else "n"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None: no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt, which an echo returns too."""
        echoed = self.logprobs if self.echo else None
        asked = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(asked, default=None)


class TokenizeRequest(BaseModel):
    """POST /tokenize (vLLM's route): a plain prompt or a conversation."""

    model_config = _STRICT
    model: Annotated[Text, Field(max_length=limits.MAX_MODEL_NAME_CHARACTERS)] | None = None
    prompt: Annotated[Text, AfterValidator(require_tokenizable), WithJsonSchema(TOKENIZE_PROMPT_SCHEMA)] | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    add_special_tokens: Annotated[bool, Field(description="of a plain prompt; a chat template has its own")] = True
    return_token_strs: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, data: Any) -> Any:
        is_chat = isinstance(data, dict) and data.get("messages") is not None
        return without_unsupported(data, TOKENIZE_CHAT_OFF_VALUES if is_chat else {})

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise conflict("prompt", "Give either 'prompt' or 'messages'.")
        if self.chat_template_kwargs and self.messages is None:
            raise conflict("chat_template_kwargs", "'chat_template_kwargs' needs 'messages'.")
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize (vLLM's route)."""

    model_config = _STRICT
    model: Annotated[Text, Field(max_length=limits.MAX_MODEL_NAME_CHARACTERS)] | None = None
    tokens: TokenIds
