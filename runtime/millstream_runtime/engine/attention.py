"""Paged attention by torch alone: one plan a step, used by every layer.

The plan sorts the step's work once, so that a layer makes as few calls as possible and copies nothing it can view:

    decodes at home     rows an equal distance apart in the pool -> one strided view of the pool, one call
    decodes elsewhere   blocks gathered into a padded batch, one call
    prompt chunks       one call each, over a view (at home) or a gathered copy

Query heads that share a key/value head are taken as rows of one query (`[.., KV, group, D]`), so that keys and
values are read once and never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.engine.kv_cache import KVCache

# A strided call reads every row up to the longest. Rows join it while the padding costs less than a call of their own.
PADDING_LIMIT_TOKENS = 256
# Scores of a prompt chunk are masked in slabs of queries, so that the mask stays below this.
MASK_LIMIT_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """`num_tokens` new tokens of one sequence, the last of `context_len` cached ones."""

    num_tokens: int
    context_len: int
    block_table: Seq[int]
    is_contiguous: bool  # whether each block of the table follows the one before it


class TorchAttention:
    """Attention of one step. Chunks of one token come first, in the order of the query's rows."""

    def __init__(self, cache: KVCache, slots: Tensor, chunks: Seq[AttentionChunk], head_dim: int) -> None:
        """`slots`: `[T]` int64, the pool place of every new token."""
        self._cache = cache
        self._slots = slots
        self._scale = head_dim**-0.5
        num_decodes = next((i for i, chunk in enumerate(chunks) if chunk.num_tokens > 1), len(chunks))
        self._calls: list[_StridedDecode | _GatheredDecode | _Prefill] = []
        self._calls += _plan_decodes(cache, chunks[:num_decodes], slots.device)
        start = num_decodes
        for chunk in chunks[num_decodes:]:
            self._calls.append(_Prefill(cache, chunk, start, slots.device))
            start += chunk.num_tokens

    def __call__(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """See `models.llama.Attention`."""
        pool = self._cache.slots[layer]
        pool.index_copy_(0, self._slots, key_value)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = pool.shape[1] // 2
        grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        if len(self._calls) == 1:
            return self._calls[0](pool, grouped, self._scale).reshape(num_tokens, -1)
        return torch.cat([call(pool, grouped, self._scale) for call in self._calls]).view(num_tokens, -1)


class _StridedDecode:
    """Decodes whose sequences lie an equal distance apart in the pool, read in place."""

    def __init__(self, cache: KVCache, chunks: list[AttentionChunk], homes: list[int], start: int) -> None:
        block = cache.block_size_tokens
        self._rows = slice(start, start + len(chunks))
        self._first_slot = homes[0] * block
        self._stride_slots = (homes[1] - homes[0]) * block if len(homes) > 1 else 0
        lens = [chunk.context_len for chunk in chunks]
        self._shape = (len(chunks), max(lens))
        self._mask = _length_mask(lens, cache.layers[0]) if min(lens) < max(lens) else None

    def __call__(self, pool: Tensor, query: Tensor, scale: float) -> Tensor:
        """`[rows, KV, group, D]`."""
        slot, head, element = pool.stride()
        view = pool.as_strided(
            (*self._shape, pool.shape[1], pool.shape[2]),
            (self._stride_slots * slot, slot, head, element),
            self._first_slot * slot,
        )
        return _attend(query[self._rows], view, self._mask, scale)


class _GatheredDecode:
    """Decodes whose blocks lie anywhere: copied side by side, padded to the longest."""

    def __init__(self, cache: KVCache, chunks: list[AttentionChunk], start: int, device: torch.device) -> None:
        self._rows = slice(start, start + len(chunks))
        lens = [chunk.context_len for chunk in chunks]
        width = -(-max(lens) // cache.block_size_tokens)
        # Padding names block 0: any finite memory will do, the mask takes it out.
        tables = [[*chunk.block_table[:width], *[0] * (width - len(chunk.block_table))] for chunk in chunks]
        self._blocks = torch.tensor(tables, device=device).view(-1)
        self._block_size_tokens = cache.block_size_tokens
        self._max_len = max(lens)
        self._mask = _length_mask(lens, cache.layers[0])

    def __call__(self, pool: Tensor, query: Tensor, scale: float) -> Tensor:
        """`[rows, KV, group, D]`."""
        blocks = pool.view(-1, self._block_size_tokens * pool.shape[1] * pool.shape[2])
        rows = query[self._rows]
        gathered = blocks.index_select(0, self._blocks).view(rows.shape[0], -1, *pool.shape[1:])
        return _attend(rows, gathered[:, : self._max_len], self._mask, scale)


class _Prefill:
    """Several new tokens of one sequence: causal among themselves, open to everything before them."""

    def __init__(self, cache: KVCache, chunk: AttentionChunk, start: int, device: torch.device) -> None:
        self._chunk = chunk
        self._rows = slice(start, start + chunk.num_tokens)
        self._block_size_tokens = cache.block_size_tokens
        self._device = device

    @cached_property
    def _blocks(self) -> Tensor:
        return torch.tensor(self._chunk.block_table, device=self._device)

    def __call__(self, pool: Tensor, query: Tensor, scale: float) -> Tensor:
        """`[num_tokens, KV, group, D]`."""
        num_tokens, context_len = self._chunk.num_tokens, self._chunk.context_len
        num_kv_heads = pool.shape[1] // 2
        if self._chunk.is_contiguous:
            first = self._chunk.block_table[0] * self._block_size_tokens
            tokens = pool[first : first + context_len]
        else:
            blocks = pool.view(-1, self._block_size_tokens, *pool.shape[1:])
            tokens = blocks.index_select(0, self._blocks).flatten(0, 1)[:context_len]
        # Heads take the place of the batch, and the group that of the heads, over keys that are not repeated.
        rows = query[self._rows].permute(1, 2, 0, 3)  # [KV, group, num_tokens, D]
        keys, values = (
            part.transpose(0, 1).unsqueeze(1).expand(-1, rows.shape[1], -1, -1)
            for part in (tokens[:, :num_kv_heads], tokens[:, num_kv_heads:])
        )
        if num_tokens == context_len:
            attended = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scale)
        else:
            attended = torch.cat(
                [
                    F.scaled_dot_product_attention(rows[:, :, part], keys, values, attn_mask=mask, scale=scale)
                    for part, mask in self._slabs
                ],
                dim=2,
            )
        return attended.permute(2, 0, 1, 3)

    @cached_property
    def _slabs(self) -> list[tuple[slice, Tensor]]:
        """Slices of the chunk's queries with their masks `[queries, context_len]`, True where a key is seen."""
        num_tokens, context_len = self._chunk.num_tokens, self._chunk.context_len
        keys = torch.arange(context_len, device=self._device)
        step = max(1, MASK_LIMIT_ELEMENTS // context_len)
        slabs = []
        for start in range(0, num_tokens, step):
            stop = min(start + step, num_tokens)
            positions = torch.arange(
                context_len - num_tokens + start, context_len - num_tokens + stop, device=keys.device
            )
            slabs.append((slice(start, stop), keys[None, :] <= positions[:, None]))
        return slabs


def _plan_decodes(
    cache: KVCache, chunks: Seq[AttentionChunk], device: torch.device
) -> list[_StridedDecode | _GatheredDecode | _Prefill]:
    """Cut the decodes, in order, into strided groups and gathered ones."""
    calls: list[_StridedDecode | _GatheredDecode | _Prefill] = []
    start = 0
    while start < len(chunks):
        homes = _strided_run(chunks[start:], cache)
        if homes:
            stop = start + len(homes)
            calls.append(_StridedDecode(cache, list(chunks[start:stop]), homes, start))
        else:
            stop = next((i for i in range(start + 1, len(chunks)) if chunks[i].is_contiguous), len(chunks))
            calls.append(_GatheredDecode(cache, list(chunks[start:stop]), start, device))
        start = stop
    return calls


def _strided_run(chunks: Seq[AttentionChunk], cache: KVCache) -> list[int]:
    """First blocks of the longest start of `chunks` that one strided view covers; [] if `chunks[0]` is scattered.

    The view needs contiguous sequences at equal distances, little padding, and to end inside the pool.
    """
    homes: list[int] = []
    longest = total = 0
    for chunk in chunks:
        home = chunk.block_table[0]
        longest, total = max(longest, chunk.context_len), total + chunk.context_len
        if not chunk.is_contiguous or (homes and home <= homes[-1]):
            break
        if len(homes) >= 2 and home - homes[-1] != homes[1] - homes[0]:
            break
        if longest * (len(homes) + 1) - total > PADDING_LIMIT_TOKENS:
            break
        if home * cache.block_size_tokens + longest > cache.num_blocks * cache.block_size_tokens:
            break
        homes.append(home)
    return homes


def _attend(query: Tensor, tokens: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`query` `[rows, KV, group, D]` over `tokens` `[rows, length, 2 * KV, D]`; `mask` `[rows, 1, 1, length]`."""
    num_kv_heads = query.shape[1]
    heads = tokens.transpose(1, 2)
    return F.scaled_dot_product_attention(
        query, heads[:, :num_kv_heads], heads[:, num_kv_heads:], attn_mask=mask, scale=scale
    )


def _length_mask(lens: list[int], like: Tensor) -> Tensor:
    """0 within each row's length, minus infinity beyond: `[rows, 1, 1, longest]` in the cache's dtype."""
    beyond = torch.arange(max(lens), device=like.device)[None, :] >= torch.tensor(lens, device=like.device)[:, None]
    mask = torch.zeros(beyond.shape, dtype=like.dtype, device=like.device).masked_fill_(beyond, float("-inf"))
    return mask[:, None, None, :]
