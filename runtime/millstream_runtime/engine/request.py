"""What enters and leaves the engine: plain data, no torch.

    server --Request--> Engine.add_request
    Engine.step() --[TokenOutput, ...]--> server

The server handles stop *strings* (it detokenises, then aborts); the engine handles token ids, lengths and the
end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended. `STOP` and `LENGTH` are OpenAI's own words, `ABORT` and `ERROR` are vLLM's.

    `ERROR`: the engine failed, or gave the request up.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestError(StrEnum):
    """Why the engine gave a request up, in one sentence for the log."""

    NOT_FINITE = "The engine gave the request up: the probabilities of its next token are not finite numbers."
    OUT_OF_MEMORY = "There was no memory for a step, and this was the largest prompt in it."


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated by the server before it gets here.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1.0` and `min_p == 0.0` switch those filters off, and so do
    penalties of 0 (presence, frequency) and 1 (repetition). With a `seed`, the tokens depend on the seed and the
    logits only, never on which other requests share the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # once for each token of the answer so far
    frequency_penalty: float = 0.0  # for each time it came up in the answer
    repetition_penalty: float = 1.0  # divides the logit of every token of prompt and answer (Keskar et al. 2019)
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    logprobs: int | None = None  # alternatives to report with each sampled token; None: no log-probabilities at all
    prompt_logprobs: int | None = None  # the same for every token of the prompt

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the model's own logits, and nothing else is asked: the fast path."""
        return (
            self.temperature == 0
            and self.min_tokens == 0
            and not self.logit_bias
            and not self.is_penalised
            and self.logprobs is None
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `prompt_token_ids` is not empty and fits the model's context with room for one token."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    is_heartbeat: bool = False  # warm-up and heartbeats never count as user traffic, and cache nothing
    priority: int = 0  # lower is served earlier among the requests of one client: see `scheduling.waiting_order`
    cache_salt: str = ""  # the prefix cache is shared among requests of equal salt only
    client: str = ""  # whose request it is, among whom the engine shares itself out: see `scheduling.fair_queue`
    client_ranks_above: bool = False  # whether this client's turn comes before that of clients without a rank


# No object of it can be part of a cycle, so the garbage collector need not look at it. With a long prompt or answer
# there are 100,000 of them, and a full collection that looks at all holds the event loop for 25 ms.
class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """A token under the model's own distribution: before temperature, penalties, bias and filters."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most probable token
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), the most probable first


@dataclass(frozen=True, slots=True)
class Prefill:
    """What is known of a request once its prompt is computed; comes with its first token."""

    scheduled_at_seconds: float  # `time.monotonic()` when it first got a place in a batch
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # one a prompt token; nothing precedes the first


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of one request; the last one carries `finish_reason`. A step may give several, in order.

    A request that the engine gives up ends without a further token: `token_id is None`, with `error`. A token of the
    end-of-sequence kind is reported like any other: the server leaves it out of the text and counts it in `usage`.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prefill: Prefill | None = None
    error: RequestError | None = None  # with `FinishReason.ERROR`


@dataclass(frozen=True, slots=True)
class GovernorReport:
    """What the governor of draft lengths has measured, and what it chooses. Steps with prompts are not among it."""

    mode: str
    length: float  # drafts per decode of the last step
    chosen_length: float  # the same as the governor chose it, whether or not it was used
    tokens_by_length: tuple[int, ...]  # by the drafts per decode of a step, rounded up
    seconds_by_length: tuple[float, ...]
    reading_seconds: float  # in which a draft model or head read prompts; not among `seconds_by_length`
    exploration_seconds: float  # lost to steps that were not the best known, reading for them included
    flips: int  # between drafting and not drafting


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals of speculation. A check is a decode with drafts; each gives one token more than it accepts drafts."""

    num_checks: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]  # drafts that stood, by their place among the drafts of a check
    skipped: dict[str, int]  # decodes without drafts, by reason: see `speculation.drafting.Skip`
    governor: GovernorReport | None = None  # None: it is disabled

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that stood."""
        return sum(self.accepted_per_position)


@dataclass(frozen=True, slots=True)
class PromptPace:
    """What bounded the prompts of the last step that they shared with decodes or with one another, as `pacing` chose.

    Rates are measured; 0 before that. `chunk_tokens`: of prompts, where none of their context is computed yet.
    """

    target_itl_seconds: float
    longest_step_seconds: float
    chunk_tokens: int
    decode_step_seconds: float  # of the step's decodes without prompts
    prompt_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps, for `/metrics` and `/ready`. Totals count users' requests only."""

    num_requests_running: int
    num_requests_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    block_size_tokens: int
    num_preemptions_total: int
    steps_total: int
    last_step_tokens: int = 0  # prompt and answer tokens that the last step computed
    recomputed_tokens_total: int = 0  # computed a second time after a preemption
    prefix_cache_queried_tokens_total: int = 0
    prefix_cache_hit_tokens_total: int = 0
    speculation: SpeculationStats | None = None  # None: it is off
    ended_by_preemptions: dict[int, int] = field(default_factory=dict)  # requests, by how often each was preempted
    prompt_pace: PromptPace | None = None  # None: time bounds no prompts, or none has shared a step yet
    queued_tokens: int = 0  # of prompts, that are to be computed before the first token of each
    running_tokens: int = 0  # in the KV cache, of the requests in the batch
    prefill_tokens_per_second: float = 0.0  # in steps with prompts, see `prefill_rate`; 0 before the first

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0.0 to 1.0. Blocks that only the prefix cache remembers are not in use."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0
