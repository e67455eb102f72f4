"""Attention of decodes, many sequences in one call: read in place, or gathered into a padded copy.

A call reads every row up to the longest. What lies behind a shorter row is padding: it may belong to another request,
or to one that is gone, and a mask alone does not take it out, because a weight of 0 times NaN is NaN. So

    on a CPU        the result is checked, and rows are computed again one by one if it has numbers that are not finite
    elsewhere       padding of the copy is set to 0, since checking would wait for the device; rows of different
                    lengths are not read in place
"""

from __future__ import annotations

import math
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

# A strided call reads every row up to the longest. A row that joins it saves a call, which costs about as much time as
# reading this much; more where other processes want the cores, since the threads of each call wait for each other.
CALL_BYTES = 512 << 10


class Lengths:
    """Context lengths of decodes side by side, and which of their columns a window leaves to be seen."""

    def __init__(self, lens: list[int], like: Tensor) -> None:
        self.count, self.longest = len(lens), max(lens)
        self._lens = lens
        self._like = like
        self._seen: dict[int | None, tuple[int, Tensor | None]] = {}

    def first(self, window: int | None) -> int:
        """The first column that any row sees."""
        return 0 if window is None else max(0, min(self._lens) - window)

    def seen(self, window: int | None) -> tuple[int, Tensor | None]:
        """`first`, and a mask `[rows, 1, 1, longest - first]`; None where all see all.

        The mask is 0 on what a row sees and minus infinity elsewhere, in the dtype of keys and values as they are read.
        """
        if window not in self._seen:
            first, ragged = self.first(window), len(set(self._lens)) > 1
            self._seen[window] = first, self._mask(window, first) if ragged else None
        return self._seen[window]

    def columns(self, window: int | None) -> int:
        """Of all rows together, padding included, those that a window leaves to be seen."""
        return self.count * (self.longest - self.first(window))

    def columns_of(self, row: int, window: int | None) -> slice:
        """What one row sees, counted from `first`."""
        first, length = self.first(window), self._lens[row]
        return slice((0 if window is None else max(0, length - window)) - first, length - first)

    def _mask(self, window: int | None, first: int) -> Tensor:
        """Every row of the mask is a piece of the same line, found by where its zeros end: one operation for all."""
        line, end = line_for(self.longest, window, self._like)
        pieces = line.unfold(0, self.longest - first, 1)
        starts = on_device([end - length + first for length in self._lens], line.device)
        return pieces.index_select(0, starts)[:, None, None, :]


class StridedDecode:
    """Decodes whose sequences lie an equal distance apart in the pool, read in place."""

    def __init__(self, cache: KVCache, chunks: list[AttentionChunk], homes: list[int], start: int) -> None:
        block = cache.block_size_tokens
        self.rows = slice(start, start + len(chunks))
        self._first_slot = homes[0] * block
        self._stride_slots = (homes[1] - homes[0]) * block if len(homes) > 1 else 0
        self._lens = Lengths([chunk.context_len for chunk in chunks], cache.like)

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._lens.columns(window)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows."""
        first = self._lens.first(spec.window)
        numbers = pool.in_place
        head, slot, element = numbers.stride()
        size = (self._lens.count, numbers.shape[0], self._lens.longest - first, numbers.shape[2])
        stride = (self._stride_slots * slot, head, slot, element)
        tokens = numbers.as_strided(size, stride, (self._first_slot + first) * slot)
        return _attend_side_by_side(query, tokens, self._lens, spec)


class GatheredDecode:
    """Decodes whose blocks lie anywhere: copied side by side, padded to the longest."""

    def __init__(self, cache: KVCache, chunks: list[AttentionChunk], start: int) -> None:
        self.rows = slice(start, start + len(chunks))
        self._lens = Lengths([chunk.context_len for chunk in chunks], cache.like)
        width = -(-self._lens.longest // cache.block_size_tokens)
        # Padding names the sequence's own last block: the mask takes it out.
        tables = [_padded(chunk.block_table[:width], width) for chunk in chunks]
        self._blocks = on_device(tables, cache.like.device)
        self._block_size_tokens = cache.block_size_tokens

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._lens.columns(window)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`."""
        first = self._lens.first(spec.window)
        first_block = first // self._block_size_tokens
        gathered = gather(pool, self._blocks[:, first_block:], self._block_size_tokens)
        skipped = first_block * self._block_size_tokens
        tokens = gathered[:, :, first - skipped : self._lens.longest - skipped]
        return _attend_side_by_side(query, tokens, self._lens, spec)


def _padded(table: Seq[int], width: int) -> list[int]:
    blocks = [*table]
    return blocks + [blocks[-1]] * (width - len(blocks))


def _attend_side_by_side(query: Tensor, tokens: Tensor, lens: Lengths, spec: AttentionSpec) -> Tensor:
    """`query` `[rows, KV, group, D]` over `tokens` `[rows, heads, longest - first, D]`, padding behind shorter rows.

    Where rows differ in length and the device is no CPU, `tokens` is a copy, which this changes.
    """
    _, mask = lens.seen(spec.window)
    if mask is not None and query.device.type != "cpu":
        tokens.masked_fill_(mask.mT != 0, 0.0)
    keys, values = keys_values(tokens, spec)
    attended = attend_decodes(query, keys, values, mask, spec)
    if mask is None or query.device.type != "cpu" or math.isfinite(attended.sum().item()):
        return attended
    alone = []
    for row in range(lens.count):
        own, columns = slice(row, row + 1), lens.columns_of(row, spec.window)
        alone.append(attend_decodes(query[own], keys[own, :, columns], values[own, :, columns], None, spec))
    return torch.cat(alone)


def gather(pool: LayerPool, blocks: Tensor, block_size_tokens: int) -> Tensor:
    """A copy of blocks: `pool` `[heads, tokens, D]` and `blocks` `[rows, n]` to `[rows, heads, n blocks of tokens, D]`.

    Every head of a block is one run of memory, and they are copied as such.
    """
    num_heads, num_tokens, head_dim = pool.shape
    num_rows, width = blocks.shape
    starts = torch.arange(num_heads, device=blocks.device)[:, None] * (num_tokens // block_size_tokens)
    runs = pool.runs((blocks[:, None, :] + starts).view(-1), block_size_tokens)
    return runs.view(num_rows, num_heads, width * block_size_tokens, head_dim)
