"""A request inside the engine: what is known of it, what is computed, and where its KV blocks are."""

from __future__ import annotations

from dataclasses import dataclass, field

from millstream_runtime.engine.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request.

        token_ids:   [ prompt ........ | generated .. ]
        computed:    [ in the KV cache .....)            <- chases len(token_ids), chunk by chunk

    A decode is the special case of one uncomputed token; a preempted sequence is the case of none computed.
    """

    request: Request
    arrival: int  # ascending; who came first is served first
    seed: int  # of the request, or drawn once by the engine
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    row: int | None = None  # place among running sequences, held from admission to the end or a preemption
    block_table: list[int] = field(default_factory=list)
    blocks_are_contiguous: bool = True  # whether each block of the table follows the one before it

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose keys and values are not in the cache yet. At least one while it runs."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens
