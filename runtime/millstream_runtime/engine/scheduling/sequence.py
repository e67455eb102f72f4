"""A request inside the engine: what is known of it, what is computed, and where its KV blocks are. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream_runtime.engine.request import Prefill, Request, TokenLogprobs
from millstream_runtime.engine.scheduling.waiting_order import queue_order

if TYPE_CHECKING:  # the protocol names tensors
    from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor
    from millstream_runtime.engine.sampling.rejection import Proposal

UNREAD = -1  # no token: one that was sampled and not read yet


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of a sequence in one group of layers, in the order of its tokens."""

    block_table: list[int] = field(default_factory=list)
    blocks_are_contiguous: bool = True  # whether each block of the table follows the one before it
    num_passed_blocks: int = 0  # first entries of the table, freed because a sliding window has passed them
    num_published_blocks: int = 0  # first blocks of the table that were published to the prefix cache

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of the table that the sequence holds."""
        return self.block_table[self.num_passed_blocks :] if self.num_passed_blocks else self.block_table


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request.

        token_ids:   [ prompt ........ | generated .. ]
        computed:    [ in the KV cache .....)            <- grows to len(token_ids), chunk by chunk

    The last `num_unread_tokens` of them were sampled by steps whose results are not read yet: they count as known, but
    only the device has their values (see `overlap`).

    A decode is the special case of one uncomputed token; a preempted sequence is the case of none computed, and a
    prefix-cache hit the case of a new sequence with some computed.

    `draft_ids` are no known tokens: a step checks them behind the last known one (see `engine.speculation`), and those
    that stand become known when it is read. There are some only while their step is under way.
    """

    request: Request
    arrival: int  # ascending; among equal orders, the first to arrive is served first
    seed: int  # of the request, or drawn once by the engine
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    row: int | None = None  # place among running sequences, held from admission to the end or a preemption
    block_table: list[int] = field(default_factory=list)
    blocks_are_contiguous: bool = True  # whether each block of the table follows the one before it
    num_passed_blocks: int = 0  # first entries of the table, freed because a sliding window has passed them
    window_passes_at_tokens: int = 0  # computed tokens from which a window may have passed another block
    other_tables: list[BlockTable] = field(default_factory=list)  # of groups of layers beyond the first
    kv_variant: int = 0  # of the keys of equal tokens; part of what the prefix cache hashes
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks; kept through preemptions
    num_published_blocks: int = 0  # first blocks of the table that were published to the prefix cache
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    num_lost_tokens: int = 0  # computed before the last preemption
    num_counted_tokens: int = 0  # first tokens that count as served, or need not be: see `fair_queue`
    num_queued_tokens: int = 0  # that the scheduler counts as to be computed before its next token
    num_preemptions: int = 0
    num_releases: int = 0  # how often all its blocks were given up: by preemptions, and where keys became stale
    scheduled_at_seconds: float | None = None  # first admission, by the engine's clock
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    processors: tuple[LogitsProcessor, ...] = ()
    is_plain_greedy: bool = False  # sampled by the argmax alone
    steps_in_flight: int = 0  # launched and not read; while there are any, the sequence keeps its row and blocks
    num_unread_tokens: int = 0
    draft_ids: list[int] = field(default_factory=list)  # that the step under way checks
    proposals: list[Proposal] = field(default_factory=list)  # drafts that were drawn, and from what; see `draft_choice`
    is_complete: bool = False  # no more tokens of it are computed
    has_ended: bool = False  # its last output was returned, or it was aborted: what is still in flight is dropped
    has_bad_numbers: bool = False  # its logits were not finite: its blocks are zeroed before another request gets them
    order: int = field(init=False)  # see `waiting_order`; the scheduler counts what is cached, and then keeps it

    def __post_init__(self) -> None:
        params = self.request.sampling
        self.order = queue_order(self.arrival, self.request.priority, self.num_prompt_tokens)
        self.is_plain_greedy = params.is_plain_greedy and not self.processors

    def expect(self) -> None:
        """Add a token that a launched step samples."""
        self.token_ids.append(UNREAD)
        self.num_unread_tokens += 1

    def accept(self, token_id: int) -> None:
        """Fill in the oldest token that was expected."""
        self.token_ids[self.num_read_tokens] = token_id
        self.num_unread_tokens -= 1

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self.expect()
        self.accept(token_id)

    def forget_expected(self) -> None:
        """Take the last expected token back: its step counts for nothing. All steps before it are read."""
        self.token_ids.pop()
        self.num_unread_tokens -= 1
        self.is_complete = False

    def forget_expected_prompt_logprobs(self) -> None:
        """Drop the places of log-probabilities that a failed step was to fill. All steps before it are read."""
        while len(self.prompt_logprobs) > 1 and self.prompt_logprobs[-1] is None:
            self.prompt_logprobs.pop()

    @property
    def num_read_tokens(self) -> int:
        """Known tokens whose values the host has read."""
        return len(self.token_ids) - self.num_unread_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose keys and values are not in the cache yet. At least one while it runs."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens to compute before it is a decode, with one uncomputed token; its prompt, if it is new."""
        num_known = len(self.token_ids)
        return max(0, num_known - (num_known > self.num_prompt_tokens) - self.num_computed_tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far, read or not."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def held_blocks(self) -> list[int]:
        """Blocks of the table that this sequence holds."""
        return self.block_table[self.num_passed_blocks :] if self.num_passed_blocks else self.block_table

    @property
    def uses_prefix_cache(self) -> bool:
        """Whether cached blocks serve it. Prompt log-probabilities need every position; heartbeats leave no trace."""
        return not self.request.is_heartbeat and self.request.sampling.prompt_logprobs is None

    @property
    def has_bad_prompt_logprobs(self) -> bool:
        """Whether one of those that go with the first token is no number; windows may have left that NaN behind."""
        is_first = self.num_read_tokens == self.num_prompt_tokens
        return is_first and any(one is not None and math.isnan(one.logprob) for one in self.prompt_logprobs)

    def prefill(self) -> Prefill:
        """What is reported of the prompt with the first token."""
        wants_prompt = self.request.sampling.prompt_logprobs is not None
        return Prefill(
            scheduled_at_seconds=self.scheduled_at_seconds or 0.0,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=tuple(self.prompt_logprobs) if wants_prompt else None,
        )
