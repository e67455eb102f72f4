"""Attention of a prompt's chunk: causal among its own tokens, open to everything before them in the window.

No mask or score grows with the product of chunk and context. On a CPU masks are views (`masks`). Elsewhere, and for
scores that a soft cap makes explicit, the queries are cut into slabs. How depends on the chunk alone, so that its
result does too.

    whole prompt                        one causal call, no mask
    a few queries                       heads of a group as more queries of one head; the mask is kept for all layers
    more behind a context, or a window  slabs of queries, each with the keys that any of them sees
    soft cap                            slabs, with explicit scores
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.decodes import gather
from millstream_runtime.engine.attention.masks import causal_mask
from millstream_runtime.engine.attention.scaled_dot_product import (
    attend_capped,
    keys_values,
    queries_within,
)
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import AttentionSpec

# Of one mask, and of all that are kept for the layers of a step.
MASK_LIMIT_BYTES = 32 << 20
# Of a slab: enough to compute well, and few enough that keys which only some of them see are a small part.
QUERIES_PER_SLAB = 1024
LEAST_QUERIES_PER_SLAB = 128  # of a layer whose window is short
# Queries of a chunk whose arithmetic takes about as long as reading their keys and values from memory.
QUERIES_A_READING = 4
# In a larger chunk the arithmetic binds, not the reading of keys and values.
MOST_MERGED_QUERIES = 32


class KeptMasks:
    """Masks of a step's chunks that all layers use, at most MASK_LIMIT_BYTES together."""

    def __init__(self) -> None:
        self._masks: dict[object, Tensor] = {}
        self._num_bytes = 0

    def of_other_rows(self) -> KeptMasks:
        """Within the same limit, masks of chunks that have other rows in the same step."""
        return _MasksOfOtherRows(self)

    def get(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        """The mask of that key; one for which there is no room is made again for each layer."""
        if key in self._masks:
            return self._masks[key]
        mask = make()
        num_bytes = mask.numel() * mask.element_size()
        if self._num_bytes + num_bytes <= MASK_LIMIT_BYTES:
            self._masks[key] = mask
            self._num_bytes += num_bytes
        return mask


class _MasksOfOtherRows(KeptMasks):
    def __init__(self, kept: KeptMasks) -> None:
        super().__init__()
        self._kept = kept

    def get(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        return self._kept.get(("other rows", key), make)


def prompt_tokens_read(chunk: AttentionChunk, window: int | None) -> int:
    """The time that a chunk takes, as tokens that a decode would read in it: it computes, where a decode waits."""
    seen = chunk.context_len if window is None else min(chunk.context_len, window + chunk.num_tokens)
    return seen * max(1, chunk.num_tokens // QUERIES_A_READING)


class PromptCall:
    """Several new tokens of one sequence."""

    def __init__(self, cache: KVCache, chunk: AttentionChunk, start: int, kept: KeptMasks) -> None:
        self._chunk = chunk
        self._kept = kept
        self.rows = slice(start, start + chunk.num_tokens)
        self._block_size_tokens = cache.block_size_tokens
        self._like = cache.like

    @cached_property
    def _blocks(self) -> Tensor:
        return on_device([self._chunk.block_table], self._like.device)

    def tokens_read(self, window: int | None) -> int:
        """The time that the call takes, as tokens that a decode would read in it."""
        return prompt_tokens_read(self._chunk, window)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[num_tokens, KV, group, D]`."""
        num_tokens, context_len = self._chunk.num_tokens, self._chunk.context_len
        tokens = self._tokens(pool)
        # Heads take the place of the batch, and the group that of the heads, over keys that are not repeated.
        rows = query.permute(1, 2, 0, 3)  # [KV, group, num_tokens, D]
        window = None if spec.window is None or spec.window >= context_len else spec.window
        if spec.softcap is not None:
            attended = self._capped(rows, tokens, window, spec)
        elif self._may_merge(rows.shape[1]):
            attended = self._merged(rows, tokens, window, spec)
        elif num_tokens == context_len and window is None:
            keys, values = self._for_groups(tokens, rows.shape[1], spec)
            attended = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=spec.scale)
        else:
            attended = self._in_slabs(rows, tokens, window, spec)
        return attended.permute(2, 0, 1, 3)

    def _tokens(self, pool: LayerPool) -> Tensor:
        """`[heads, context_len, D]`: a view, or a copy where blocks are scattered or quantized."""
        context_len = self._chunk.context_len
        if self._chunk.is_contiguous:
            first = self._chunk.block_table[0] * self._block_size_tokens
            return pool.between(first, first + context_len)
        return gather(pool, self._blocks, self._block_size_tokens)[0, :, :context_len]

    @staticmethod
    def _for_groups(tokens: Tensor, group: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """Keys and values `[KV, group, tokens, D]`: views."""
        keys, values = (part.unsqueeze(1).expand(-1, group, -1, -1) for part in keys_values(tokens, spec))
        return keys, values

    def _may_merge(self, group: int) -> bool:
        num_tokens, context_len = self._chunk.num_tokens, self._chunk.context_len
        mask_bytes = group * num_tokens * context_len * self._like.element_size()
        return num_tokens <= MOST_MERGED_QUERIES and num_tokens < context_len and mask_bytes <= MASK_LIMIT_BYTES

    def _merged(self, rows: Tensor, tokens: Tensor, window: int | None, spec: AttentionSpec) -> Tensor:
        """The heads of a group as more queries of one head, which reads its keys and values once for all of them.

        Behind a long context, reading is what a small chunk costs.
        """
        num_heads, group, num_tokens, head_dim = rows.shape
        keys = _seen_keys(self._chunk.context_len - num_tokens, self._chunk.context_len, window)

        def make() -> Tensor:
            mask = causal_mask(num_tokens, keys, window, self._like)
            return mask.expand(group, *mask.shape).reshape(group * num_tokens, -1)

        mask = self._kept.get((self.rows.start, window, group), make)
        queries = rows.flip(2).reshape(1, num_heads, group * num_tokens, head_dim)
        own_keys, values = keys_values(tokens[None, :, keys], spec)
        attended = F.scaled_dot_product_attention(queries, own_keys, values, attn_mask=mask, scale=spec.scale)
        return attended.view(num_heads, group, num_tokens, -1).flip(2)

    def _in_slabs(self, rows: Tensor, tokens: Tensor, window: int | None, spec: AttentionSpec) -> Tensor:
        most = QUERIES_PER_SLAB if window is None else min(QUERIES_PER_SLAB, max(LEAST_QUERIES_PER_SLAB, window))
        if self._like.device.type != "cpu":
            most = min(most, max(1, MASK_LIMIT_BYTES // (self._chunk.context_len * self._like.element_size())))
        attended = []
        for queries, keys in self._slabs(window, most):
            mask = causal_mask(queries.stop - queries.start, keys, window, self._like)
            own_keys, values = self._for_groups(tokens[:, keys], rows.shape[1], spec)
            slab = rows[:, :, queries].flip(2)
            out = F.scaled_dot_product_attention(slab, own_keys, values, attn_mask=mask, scale=spec.scale)
            attended.append(out.flip(2))
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)

    def _capped(self, rows: Tensor, tokens: Tensor, window: int | None, spec: AttentionSpec) -> Tensor:
        num_heads, group, num_tokens, _ = rows.shape
        seen = self._chunk.context_len if window is None else min(self._chunk.context_len, window + num_tokens)
        attended = []
        for queries, keys in self._slabs(window, queries_within(num_heads * group * seen, rows.dtype)):
            mask = causal_mask(queries.stop - queries.start, keys, window, self._like)
            own_keys, values = keys_values(tokens[:, keys], spec)
            attended.append(attend_capped(rows[:, :, queries].flip(2), own_keys, values, mask, spec).flip(2))
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)

    def _slabs(self, window: int | None, most_queries: int) -> Iterator[tuple[slice, slice]]:
        """Runs of queries and the keys that any of them sees."""
        num_tokens, start = self._chunk.num_tokens, self._chunk.context_len - self._chunk.num_tokens
        for first in range(0, num_tokens, most_queries):
            stop = min(first + most_queries, num_tokens)
            yield slice(first, stop), _seen_keys(start + first, start + stop, window)


def _seen_keys(first_position: int, end: int, window: int | None) -> slice:
    """What queries from `first_position` up to `end` see."""
    return slice(0 if window is None else max(0, first_position - window + 1), end)
