"""What requests take of one rank's KV pool: in tokens, or in blocks where groups of layers have block tables.

    one table for all layers    a token takes the same bytes in every request
    a table per group           a request takes its length in full layers, and in windowed ones its window: fewer bytes
                                per token the longer it is, and for a moment those of a step's chunk

The layout and the blocks of a request are the engine's own (`millstream_runtime.kv_layout`), so a plan promises what
the engine allocates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream_operator.catalog.model_shape import ModelShape
from millstream_runtime.config import DEFAULT_BLOCK_SIZE_TOKENS
from millstream_runtime.kv_layout import MOST_BLOCKS, RequestBlocks, choose_layout


@dataclass(frozen=True, slots=True)
class KvPool:
    """The pool of one rank.

    Attributes:
        token_bytes: of one token in all layers, where they share a block table.
        blocks: of a request, where groups of layers have block tables; None: they share one.
        block_bytes: of one block of a group.
        max_model_len: of the longest request, in tokens.
        max_num_seqs: requests at once.
    """

    token_bytes: int
    max_model_len: int
    max_num_seqs: int
    blocks: RequestBlocks | None = None
    block_bytes: int = 0

    def tokens(self, pool_bytes: int) -> int:
        """Tokens that the pool holds, counted as the engine does: in requests as long as may be."""
        if self.blocks is None:
            return pool_bytes // self.token_bytes
        num_blocks = self._num_blocks(pool_bytes)
        longest = min(self.max_model_len, self.blocks.longest_request(num_blocks, self.max_model_len))
        return self.blocks.tokens(num_blocks, longest) if longest else 0

    def bytes_for(self, requests: Iterable[tuple[int, int]]) -> int:
        """Bytes with which the pool holds any one of these: so many requests of so many tokens, at any time."""
        if self.blocks is None:
            return max(count * tokens for count, tokens in requests) * self.token_bytes
        return max(count * self.blocks.most(tokens) for count, tokens in requests) * self.block_bytes

    def requests(self, pool_bytes: int, num_tokens: int) -> int:
        """Requests of so many tokens that the pool holds at the same time, of which one may be in its prompt."""
        if self.blocks is None:
            return pool_bytes // self.token_bytes // num_tokens
        left = self._num_blocks(pool_bytes) - self.blocks.most(num_tokens)
        return 0 if left < 0 else 1 + left // self.blocks.settled(num_tokens)

    @property
    def largest_bytes(self) -> int | None:
        """What the engine allocates at most, however much memory there is; None: not limited by blocks."""
        if self.blocks is None:
            return None
        return max(MOST_BLOCKS, self.blocks.most(self.max_model_len) * self.max_num_seqs) * self.block_bytes

    def _num_blocks(self, pool_bytes: int) -> int:
        return max(0, min(pool_bytes, self.largest_bytes or pool_bytes)) // self.block_bytes


def kv_pool(
    shape: ModelShape,
    token_bytes: int,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    is_grouped: bool | None,
    draft_token_bytes: int = 0,
) -> KvPool:
    """Return the pool for these engine limits.

    Args:
        token_bytes: of one token in all layers that share the pool.
        is_grouped: see `choose_layout`. False where a draft model or pipeline stages share the layers.
        draft_token_bytes: of one token in the draft model's pool, which has as many blocks.
    """
    layout = choose_layout(
        shape.windows,
        shape.num_layers,
        max_model_len=max_model_len,
        block_size_tokens=DEFAULT_BLOCK_SIZE_TOKENS,
        max_num_batched_tokens=max_num_batched_tokens,
        is_grouped=is_grouped,
    )
    if layout.num_groups == 1:
        return KvPool(token_bytes + draft_token_bytes, max_model_len, max_num_seqs)
    return KvPool(
        token_bytes,
        max_model_len,
        max_num_seqs,
        RequestBlocks(layout, DEFAULT_BLOCK_SIZE_TOKENS, max_num_batched_tokens),
        (token_bytes // shape.num_layers * layout.layers_per_group + draft_token_bytes) * DEFAULT_BLOCK_SIZE_TOKENS,
    )
