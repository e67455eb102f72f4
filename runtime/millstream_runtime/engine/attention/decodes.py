"""Attention of decodes, many sequences in one call: read in place, or gathered into a padded copy.

A call reads every row up to the longest. What lies behind a shorter row is padding: it may belong to another request,
or to one that is gone, and a mask alone does not take it out, because a weight of 0 times NaN is NaN. So

    on a CPU        the result is checked, and rows are computed again one by one if it has numbers that are not finite
                    (`decode_batch`)
    elsewhere       padding of the copy is set to 0, since checking would wait for the device; rows of different
                    lengths are not read in place
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.masks import line_for
from millstream_runtime.engine.attention.scaled_dot_product import attend_decodes, keys_values
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import AttentionSpec


class Lengths:
    """Context lengths of sequences side by side, and which of their columns a window leaves to be seen."""

    def __init__(self, chunks: Seq[AttentionChunk], like: Tensor) -> None:
        self._lens = [chunk.context_len for chunk in chunks]
        # What the first query of each sees: a decode has one query, a check several.
        self._first_lens = [chunk.context_len - chunk.num_tokens + 1 for chunk in chunks]
        self.count, self.longest = len(chunks), max(self._lens)
        self.is_ragged = len(set(self._lens)) > 1
        self.like = like
        self._seen: dict[int | None, tuple[int, Tensor | None]] = {}

    def first(self, window: int | None) -> int:
        """The first column that any query sees."""
        return 0 if window is None else max(0, min(self._first_lens) - window)

    def seen(self, window: int | None) -> tuple[int, Tensor | None]:
        """`first`, and a mask `[rows, 1, 1, longest - first]`; None where all see all.

        The mask is 0 on what a row sees and minus infinity elsewhere, in the dtype of keys and values as they are read.
        """
        if window not in self._seen:
            first = self.first(window)
            self._seen[window] = first, self._mask(window, first) if self.is_ragged else None
        return self._seen[window]

    def columns(self, window: int | None) -> int:
        """Of all rows together, padding included, those that a window leaves to be seen."""
        return self.count * (self.longest - self.first(window))

    def columns_of(self, row: int, window: int | None) -> slice:
        """What the queries of one row see, counted from `first`."""
        first = self.first(window)
        own_first = 0 if window is None else max(0, self._first_lens[row] - window)
        return slice(own_first - first, self._lens[row] - first)

    def _mask(self, window: int | None, first: int) -> Tensor:
        """Every row of the mask is a piece of the same line, found by where its zeros end: one operation for all."""
        line, end = line_for(self.longest, window, self.like)
        pieces = line.unfold(0, self.longest - first, 1)
        starts = on_device([end - length + first for length in self._lens], line.device)
        return pieces.index_select(0, starts)[:, None, None, :]


class StridedTokens:
    """Keys and values of sequences that lie an equal distance apart in the pool, read in place."""

    def __init__(self, cache: KVCache, chunks: Seq[AttentionChunk], homes: list[int]) -> None:
        block = cache.block_size_tokens
        self._first_slot = homes[0] * block
        self._stride_slots = (homes[1] - homes[0]) * block if len(homes) > 1 else 0
        self.lens = Lengths(chunks, cache.like)

    def read(self, pool: LayerPool, window: int | None) -> Tensor:
        """`[sequences, heads, longest - first, D]`."""
        first, _ = self.lens.seen(window)
        numbers = pool.in_place
        head, slot, element = numbers.stride()
        size = (self.lens.count, numbers.shape[0], self.lens.longest - first, numbers.shape[2])
        stride = (self._stride_slots * slot, head, slot, element)
        return numbers.as_strided(size, stride, (self._first_slot + first) * slot)


class GatheredTokens:
    """Keys and values of sequences whose blocks lie anywhere: copied side by side, padded to the longest."""

    def __init__(self, cache: KVCache, chunks: Seq[AttentionChunk]) -> None:
        self.lens = Lengths(chunks, cache.like)
        width = -(-self.lens.longest // cache.block_size_tokens)
        # Padding names the sequence's own last block: the mask takes it out.
        tables = [_padded(chunk.block_table[:width], width) for chunk in chunks]
        self._blocks = on_device(tables, cache.like.device)
        self._block_size_tokens = cache.block_size_tokens

    def read(self, pool: LayerPool, window: int | None) -> Tensor:
        """`[sequences, heads, longest - first, D]`."""
        first = self.lens.first(window)
        first_block = first // self._block_size_tokens
        gathered = gather(pool, self._blocks[:, first_block:], self._block_size_tokens)
        skipped = first_block * self._block_size_tokens
        return gathered[:, :, first - skipped : self.lens.longest - skipped]


SequenceTokens = StridedTokens | GatheredTokens


class DecodeCall:
    """Decodes, one query each, from row `start` of the step's queries on. Not on a CPU: see `decode_batch`."""

    def __init__(self, tokens: SequenceTokens, start: int) -> None:
        self._tokens = tokens
        self.rows = slice(start, start + tokens.lens.count)

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._tokens.lens.columns(window)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows."""
        tokens = self._tokens.read(pool, spec.window)
        _, mask = self._tokens.lens.seen(spec.window)
        if mask is not None:  # the copy's padding
            tokens.masked_fill_(mask.mT != 0, 0.0)
        keys, values = keys_values(tokens, spec)
        return attend_decodes(query, keys, values, mask, spec)


def _padded(table: Seq[int], width: int) -> list[int]:
    blocks = [*table]
    return blocks + [blocks[-1]] * (width - len(blocks))


def gather(pool: LayerPool, blocks: Tensor, block_size_tokens: int) -> Tensor:
    """A copy of blocks: `pool` `[heads, tokens, D]` and `blocks` `[rows, n]` to `[rows, heads, n blocks of tokens, D]`.

    Every head of a block is one run of memory, and they are copied as such.
    """
    num_heads, num_tokens, head_dim = pool.shape
    num_rows, width = blocks.shape
    starts = torch.arange(num_heads, device=blocks.device)[:, None] * (num_tokens // block_size_tokens)
    runs = pool.runs((blocks[:, None, :] + starts).view(-1), block_size_tokens)
    return runs.view(num_rows, num_heads, width * block_size_tokens, head_dim)
