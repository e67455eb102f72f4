"""Attention of decodes by torch, many sequences in one call: read in place, or gathered into a padded copy.

A call reads every row up to the longest. What lies behind a shorter row is padding: it may belong to another request,
or to one that is gone, and a mask alone does not take it out, because a weight of 0 times NaN is NaN. So the padding of
a copy is set to 0 (`attend_padded`), and rows are read in place only where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
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
        self.like = like
        self._padding: dict[int | None, Tensor | None] = {}
        self._masks: dict[int | None, Tensor | None] = {}

    def first(self, window: int | None) -> int:
        """The first column that any query sees."""
        return min(self._firsts(window))

    def columns(self, window: int | None) -> int:
        """Of all rows together, padding included, those that a window leaves to be seen."""
        return self.count * (self.longest - self.first(window))

    def padding(self, window: int | None) -> Tensor | None:
        """`[rows, longest - first]`, bool: what no query of the row sees. None: there is nothing like it."""
        if window not in self._padding:
            self._padding[window] = self._outside(self._firsts(window))
        return self._padding[window]

    def mask(self, window: int | None) -> Tensor | None:
        """The same of decodes, `[rows, 1, 1, longest - first]`: minus infinity on padding, 0 elsewhere."""
        if window not in self._masks:
            padding = self.padding(window)
            self._masks[window] = None if padding is None else _infinite(padding, self.like)
        return self._masks[window]

    def _firsts(self, window: int | None) -> list[int]:
        return [0 if window is None else max(0, length - window) for length in self._first_lens]

    def _outside(self, firsts: list[int]) -> Tensor | None:
        if len({*self._lens}) == 1 and len({*firsts}) == 1:
            return None
        first, end = on_device([firsts, self._lens], self.like.device).unsqueeze(-1)
        columns = torch.arange(min(firsts), self.longest, device=self.like.device)
        outside: Tensor = (columns < first) | (columns >= end)
        return outside


class StridedTokens:
    """Keys and values of sequences of one length that lie an equal distance apart in the pool, read in place."""

    def __init__(self, cache: KVCache, chunks: Seq[AttentionChunk]) -> None:
        block, homes = cache.block_size_tokens, [chunk.block_table[0] for chunk in chunks]
        self._first_slot = homes[0] * block
        self._stride_slots = (homes[1] - homes[0]) * block if len(homes) > 1 else 0
        self.lens = Lengths(chunks, cache.like)

    def read(self, pool: LayerPool, window: int | None) -> Tensor:
        """`[sequences, heads, longest - first, D]`."""
        first = self.lens.first(window)
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
        # Padding names the sequence's own last block.
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
    """Decodes, one query each, from row `start` of the step's queries on."""

    def __init__(self, tokens: SequenceTokens, start: int) -> None:
        self._tokens = tokens
        self.rows = slice(start, start + tokens.lens.count)

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._tokens.lens.columns(window)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows."""
        lens, mask = self._tokens.lens, self._tokens.lens.mask(spec.window)

        def attend(tokens: Tensor) -> Tensor:
            return attend_decodes(query, *keys_values(tokens, spec), mask, spec)

        return attend_padded(attend, self._tokens.read(pool, spec.window), lens.padding(spec.window))


def attend_padded(attend: Callable[[Tensor], Tensor], tokens: Tensor, padding: Tensor | None) -> Tensor:
    """`attend(tokens)` as if `padding` of `tokens` `[rows, heads, columns, D]` were 0; see `Lengths.padding`.

    Setting it takes as long as the copy did. On a CPU the result says whether it matters; a GPU would be waited for.
    """
    if padding is None:
        return attend(tokens)
    if tokens.device.type == "cpu":
        attended = attend(tokens)
        if math.isfinite(attended.sum().item()):
            return attended
    return attend(tokens.masked_fill_(padding[:, None, :, None], 0.0))


def _infinite(padding: Tensor, like: Tensor) -> Tensor:
    zeros = torch.zeros(padding.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill_(padding, -torch.inf)[:, None, None, :]


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
