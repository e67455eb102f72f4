"""What enters and leaves the engine: plain data, no torch.

    server --Request--> Engine.add_request
    Engine.step() --[TokenOutput, ...]--> server

Stop *strings* are the server's business (it detokenises, then aborts); token ids, lengths and the end-of-sequence
token are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended. `STOP` and `LENGTH` are OpenAI's own words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Validated by the server before it gets here.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1.0` switch those filters off. With a `seed`, the
    tokens depend on the seed and the logits only, never on which other requests share the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `prompt_token_ids` is not empty and fits the model's context with room for one token."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    is_heartbeat: bool = False  # warm-up and heartbeats never count as user traffic


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of one request; the last one carries `finish_reason`.

    A request that ends without a further token (an abort that the engine itself decided on) has
    `token_id is None`. A token of the end-of-sequence kind is reported like any other: the server leaves it
    out of the text and counts it in `usage`.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps, for `/metrics` and `/ready`."""

    num_requests_running: int
    num_requests_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    block_size_tokens: int
    num_preemptions_total: int
    steps_total: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0.0 to 1.0."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0
