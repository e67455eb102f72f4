"""The answers as types, for /openapi.json alone: answers are written as plain dicts, because validating costs time.

A test holds real answers against these schemas; no field may be missing here, and none may be invented.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from millstream_runtime.boot import Phase


class _Closed(BaseModel):
    """Has no further fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Closed):
    """`param` is the path of the field that is wrong."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorBody(_Closed):
    """Every answer that is no 2xx, and the `error` event of a stream."""

    error: ErrorDetail


class CachedTokens(_Closed):
    """Tokens of the prompts that the prefix cache held."""

    cached_tokens: int


class Usage(_Closed):
    """A prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenLogprob(_Closed):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer and the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Closed):
    """Every sampled token of a choice, or of a chunk."""

    content: list[ChosenLogprob]
    refusal: None


class ChatAnswer(_Closed):
    """The text of one choice."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Closed):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(_Closed):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(_Closed):
    """New text; the first chunk of a choice has its role, the last one nothing."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    refusal: None = None


class ChatChunkChoice(_Closed):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(_Closed):
    """The `data` of one event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(default=None, description="only with stream_options.include_usage")


class CompletionLogprobs(_Closed):
    """Parallel lists, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(_Closed):
    """A token of the prompt, or one that is likelier in its place."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(_Closed):
    """One answer, or in a stream a piece of it, of which the last has a `finish_reason`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: list[dict[str, PromptToken] | None] = Field(
        default_factory=list, description="only if they were asked for"
    )


class Completion(_Closed):
    """The answer of /v1/completions, and the `data` of one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = Field(default=None, description="in a stream only with stream_options.include_usage")


class ModelCard(_Closed):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["millstream"]
    max_model_len: int | None = Field(description="null until the model is loaded")


class ModelList(_Closed):
    """Always one model."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Closed):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(_Closed):
    """The answer of /detokenize."""

    prompt: str


class Version(_Closed):
    """The answer of /version."""

    version: str


class Health(_Closed):
    """The answer of /health, also with 503."""

    status: Literal["ok", "unresponsive", "restarting", "failed"]
    engine_restarts: int


class Progress(_Closed):
    """Of the weights, while they are read."""

    done_bytes: int
    total_bytes: int


class Threads(_Closed):
    """How many threads a CPU uses for a step of at most `most_tokens` (null: of any more)."""

    most_tokens: int | None
    threads: int


class MeasuredStep(_Closed):
    """A step that the warm-up timed. `context_tokens`: of all its sequences together, in the KV cache before it."""

    sequences: int
    new_tokens: int
    context_tokens: int
    step_microseconds: int


class Kernel(_Closed):
    """What computes one part of the engine, and why."""

    backend: str
    reason: str


class LinearArithmetic(_Closed):
    """By which arithmetic quantized layers are computed, how many, and why."""

    computed_by: str
    layers: int
    reason: str
    rounded_while_loading: bool = False


class Speculation(_Closed):
    """What proposes tokens, and totals since the engine started: decodes that drafted (`checks`), and decodes that did
    not, by reason (`skipped`). With a governor its mode, and the drafts per decode that it chose last."""

    method: str
    maxDraftTokens: int  # noqa: N815 - the API's word
    checks: int = 0
    draftTokens: int = 0  # noqa: N815
    acceptedTokens: int = 0  # noqa: N815
    skipped: dict[str, int] = {}
    governor: str = ""
    draftLength: float = 0.0  # noqa: N815


class PromptStepLimit(_Closed):
    """What bounded the prompts of the last step that they shared with decodes or with one another."""

    target_itl_milliseconds: int
    step_limit_milliseconds: float
    chunk_limit_tokens: int
    decode_step_milliseconds: float
    prompt_tokens_per_second: int


class Readiness(_Closed):
    """The answer of /ready, also with 503. What is not known is left out."""

    ready: bool
    phase: Phase
    model: str
    config_hash: str
    message: str
    topology: dict[str, Any] | None
    boot_seconds: dict[str, float]
    boot_bytes: dict[str, int]
    weights_bytes_per_second: int = 0
    progress: Progress = Progress(done_bytes=0, total_bytes=0)
    eta_seconds: float = 0.0
    memory: dict[str, int] = Field(default_factory=dict)
    kv_cache_dtype: str = ""
    speculation: Speculation = Speculation(method="", maxDraftTokens=0)
    prompt_pace: PromptStepLimit = PromptStepLimit(
        target_itl_milliseconds=0,
        step_limit_milliseconds=0.0,
        chunk_limit_tokens=0,
        decode_step_milliseconds=0.0,
        prompt_tokens_per_second=0,
    )
    kernels: dict[str, Kernel] = Field(default_factory=dict)
    linears: list[LinearArithmetic] = Field(default_factory=list)
    threads: list[Threads] = Field(default_factory=list)
    api_keys_problem: str = ""
    text: dict[str, Any] = Field(
        default_factory=dict, description="what was chosen from which file of the model folder"
    )
    step_times: list[MeasuredStep] = Field(default_factory=list)


class LoadCounts(_Closed):
    """What waits, and what is in the batch."""

    queued: int
    running: int


class LoadBlocks(_Closed):
    """The KV pool. Blocks that only the prefix cache remembers are free."""

    free_blocks: int
    total_blocks: int
    block_size_tokens: int


class LoadAnswer(_Closed):
    """A request whose prompt was computed, by the first 64 bits of the SHA-256 of its X-Request-Id."""

    id: str = Field(pattern="^[0-9a-f]{16}$")
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_seconds: float


class LoadState(_Closed):
    """The answer of /load. Null: there is no engine that serves, or no such step was measured."""

    boot_id: str
    phase: Phase
    requests: LoadCounts | None
    tokens: LoadCounts | None
    kv: LoadBlocks | None
    prefill_tokens_per_second: float | None
    itl_seconds: float | None
    cursor: str = Field(description="`since` of the next request")
    missed: int = Field(description="answers behind the cursor `since` that are not known any more")
    answers: list[LoadAnswer] = Field(max_length=256)
