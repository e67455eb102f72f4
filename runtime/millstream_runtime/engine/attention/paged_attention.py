"""Paged attention by torch alone: one plan per step, used by every layer.

The plan sorts the step's work once, so that a layer makes as few calls as possible and copies nothing it can view:

    decodes in regions  rows an equal distance apart in the pool -> one strided view of the pool, one call
    decodes elsewhere   blocks gathered into a padded batch, one call for up to GATHER_LIMIT_BYTES;
                        also those whose keys and values are quantized, dequantized in the copy
    prompt chunks       one call each, over a view (contiguous blocks) or a gathered copy

On CUDA, FlashAttention takes all decodes at home in one call, all such chunks in another (`varlen_attention`).

Query heads that share a key/value head are taken as rows of one query (`[.., KV, group, D]`), so that keys and
values are read once and never repeated. A layer with a sliding window reads only the tokens within it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from itertools import accumulate, groupby

import torch
from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.decodes import CALL_BYTES, GatheredDecode, StridedDecode
from millstream_runtime.engine.attention.prefill import KeptMasks, PromptCall
from millstream_runtime.engine.attention.varlen_attention import VarlenCall
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.models.layers.attention import AttentionSpec

# What one gathered call copies of a layer's keys and values, unless a single sequence is longer.
GATHER_LIMIT_BYTES = 64 << 20

KVRead = Callable[[int], AbstractContextManager[None]]
"""Returns a context for a call that reads this many bytes of the KV pool; see `DevicePolicy.kv_read`."""


Call = StridedDecode | GatheredDecode | PromptCall | VarlenCall


class TorchAttention:
    """Attention of one step. Chunks of one token come first, in the order of the query's rows."""

    def __init__(
        self,
        cache: KVCache,
        slots: Tensor,
        chunks: Seq[AttentionChunk],
        kv_read: KVRead | None = None,
        kept: KeptMasks | None = None,
    ) -> None:
        """`slots`: `[T]` int64, the slot in the pool of every new token. `kept`: masks of the same step, to share."""
        self._cache = cache
        self._kv_read = kv_read
        self._slots = slots
        self._chunks = chunks
        self._longest = max((chunk.context_len for chunk in chunks), default=0)
        self._may_use_varlen = varlen_attention.can_read(cache.heads[0])
        self._kept = kept if kept is not None else KeptMasks()
        self._plans: dict[bool, list[Call]] = {}  # with calls of `varlen_attention` or without

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `models.attention.Attention`."""
        pool = self._cache.layer(layer)
        pool.write(self._slots, key_value)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = 1 if spec.latent_dim else pool.shape[0] // 2
        grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        calls = self._calls(spec)
        if len(calls) == 1:
            attended = self._attend(calls[0], pool, grouped, spec)
        else:
            attended = torch.cat([self._attend(call, pool, grouped[call.rows], spec) for call in calls])
        if spec.latent_dim:
            attended = attended[..., : spec.latent_dim]
        return attended.reshape(num_tokens, -1)

    def _calls(self, spec: AttentionSpec) -> list[Call]:
        use_varlen = self._may_use_varlen and varlen_attention.can_compute(spec, self._longest)
        if use_varlen not in self._plans:
            self._plans[use_varlen] = _plan(self._cache, self._chunks, self._kept, use_varlen=use_varlen)
        return self._plans[use_varlen]

    def _attend(self, call: Call, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        if self._kv_read is None:
            return call(pool, query, spec)
        with self._kv_read(call.tokens_read(spec.window) * self._cache.token_bytes):
            return call(pool, query, spec)


def _plan(cache: KVCache, chunks: Seq[AttentionChunk], kept: KeptMasks, *, use_varlen: bool) -> list[Call]:
    """The calls for all chunks, in the order of their rows."""
    calls: list[Call] = []
    row = 0
    for (is_prompt, is_varlen), group in groupby(
        chunks, lambda chunk: (chunk.num_tokens > 1, use_varlen and chunk.is_contiguous)
    ):
        alike = list(group)
        if is_varlen:
            calls.append(VarlenCall(cache, alike, row))
        elif is_prompt:
            starts = accumulate((chunk.num_tokens for chunk in alike), initial=row)
            calls += [PromptCall(cache, chunk, start, kept) for chunk, start in zip(alike, starts, strict=False)]
        else:
            calls += _plan_decodes(cache, alike, row)
        row += sum(chunk.num_tokens for chunk in alike)
    return calls


def _plan_decodes(cache: KVCache, chunks: list[AttentionChunk], first_row: int) -> list[StridedDecode | GatheredDecode]:
    """Cut the decodes, in order, into strided groups and gathered ones."""
    if cache.like.device.type != "cpu":
        return _plan_without_padding(cache, chunks, first_row)
    call_tokens = CALL_BYTES // cache.token_bytes
    if not cache.is_in_place:
        return [*_gathered(cache, chunks, first_row, call_tokens)]
    calls: list[StridedDecode | GatheredDecode] = []
    start = 0
    while start < len(chunks):
        homes = _strided_run(chunks[start:], cache, call_tokens)
        if homes:
            stop = start + len(homes)
            calls.append(StridedDecode(cache, chunks[start:stop], homes, first_row + start))
        else:
            stop = next((i for i in range(start + 1, len(chunks)) if chunks[i].is_contiguous), len(chunks))
            calls += _gathered(cache, chunks[start:stop], first_row + start)
        start = stop
    return calls


def _plan_without_padding(
    cache: KVCache, chunks: list[AttentionChunk], first_row: int
) -> list[StridedDecode | GatheredDecode]:
    """One strided call where all sequences are equally long; else gathered copies, whose padding can be set to 0."""
    homes = _strided_run(chunks, cache, 0) if cache.is_in_place else []
    if len(homes) == len(chunks):
        return [StridedDecode(cache, chunks, homes, first_row)]
    return [*_gathered(cache, chunks, first_row)]


def _gathered(
    cache: KVCache, chunks: list[AttentionChunk], first_row: int, call_tokens: int | None = None
) -> list[GatheredDecode]:
    """As few calls as copy no more than GATHER_LIMIT_BYTES each.

    `call_tokens`: the padding that a call may have for each call that it saves; None is no bound.
    """
    most_tokens = GATHER_LIMIT_BYTES // cache.token_bytes
    calls: list[GatheredDecode] = []
    start = longest = total = 0
    for index, chunk in enumerate(chunks):
        longest, total = max(longest, chunk.context_len), total + chunk.context_len
        copied, num_rows = longest * (index + 1 - start), index - start
        if num_rows and (copied > most_tokens or (call_tokens is not None and copied - total > call_tokens * num_rows)):
            calls.append(GatheredDecode(cache, chunks[start:index], first_row + start))
            start, longest, total = index, chunk.context_len, chunk.context_len
    return [*calls, GatheredDecode(cache, chunks[start:], first_row + start)]


def _strided_run(chunks: Seq[AttentionChunk], cache: KVCache, call_tokens: int) -> list[int]:
    """First blocks of the longest start of `chunks` that one strided view covers; [] if `chunks[0]` is scattered.

    The view needs contiguous sequences at equal distances, no more padding than `call_tokens` for each call that it
    saves, and to end inside the pool.
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
        if longest * (len(homes) + 1) - total > call_tokens * len(homes):
            break
        if home * cache.block_size_tokens + longest > cache.num_blocks * cache.block_size_tokens:
            break
        homes.append(home)
    return homes
