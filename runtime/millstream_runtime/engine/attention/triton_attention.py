"""Attention by the Triton kernels of `millstream_kernels`: of an eager step, and of a padded step of decodes.

Tables and lengths are tensors on the device. Nothing is gathered, padded to the longest or masked, wherever blocks lie:

    chunks of one token   `decode`: one result for one row, whatever its company
    longer chunks         `prefill`: one result for one row, however its prompt is cut
    a latent (MLA)        `mla`, for both

Keys and values in 8 bits are read as codes, wherever they lie, and never dequantized in memory; a latent is not.

Importing this imports triton: only an engine that chose these kernels does (`execution.kernel_choice`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from millstream_kernels.attention.decode import paged_decode_attention
from millstream_kernels.attention.mla import mla_attention
from millstream_kernels.attention.prefill import paged_prefill_attention
from millstream_kernels.attention.specification import PagedRequests, Scores
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.pool_attention import PoolAttention
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import AttentionSpec

ALIGNED_NUMBERS = 4  # int32 in 16 bytes: kernels are compiled for tensors that begin at multiples of it


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring chunks that one kernel computes."""

    rows: slice
    is_decode: bool
    requests: PagedRequests


class TritonAttention(PoolAttention):
    """Attention of one step; see `models.attention.Attention`."""

    def __init__(self, cache: KVCache, slots: Tensor, chunks: Seq[AttentionChunk]) -> None:
        """`slots`: `[T]` int64, the slot in the pool of every new token."""
        super().__init__(cache, slots)
        self._runs: list[_Run] = []
        row = 0
        for is_decode, group in groupby(chunks, lambda chunk: chunk.num_tokens == 1):
            alike = list(group)
            stop = row + sum(chunk.num_tokens for chunk in alike)
            requests = _requests(alike, cache.block_size_tokens, cache.like.device)
            self._runs.append(_Run(slice(row, stop), is_decode, requests))
            row = stop

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        pool, scales = self._cache.layer(layer).tensors
        size = spec.latent_dim or query.shape[2]
        attended = torch.empty(*query.shape[:2], size, dtype=query.dtype, device=query.device)
        for run in self._runs:
            rows, output = query[run.rows], attended[run.rows]
            if spec.latent_dim is not None:
                mla_attention(rows, pool, size, run.requests, spec.scale, output=output)
                continue
            kernel = paged_decode_attention if run.is_decode else paged_prefill_attention
            kernel(rows, pool, run.requests, _scores(spec), kv_scales=scales, output=output)
        return attended.view(query.shape[0], -1)


class TritonStaticAttention(PoolAttention):
    """Attention of one padded step of decodes, whose numbers a CUDA graph finds in buffers. One object a pass."""

    def __init__(self, cache: KVCache, slots: Tensor, tables: Tensor, lengths: Tensor) -> None:
        """`slots`, `lengths`: `[rows]`; `tables`: `[rows, width]`; int64. Padding has length 1 and the zero block."""
        super().__init__(cache, slots)
        num_rows, width = tables.shape
        self._requests = PagedRequests(
            tables=tables.int(),
            lengths=lengths.int(),
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=tables.device),
            max_queries=1,
            max_length=width * cache.block_size_tokens,
            block_size_tokens=cache.block_size_tokens,
        )

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        pool, scales = self._cache.layer(layer).tensors
        if spec.latent_dim is not None:
            attended = mla_attention(query, pool, spec.latent_dim, self._requests, spec.scale)
        else:
            attended = paged_decode_attention(query, pool, self._requests, _scores(spec), kv_scales=scales)
        return attended.view(query.shape[0], -1)


def _scores(spec: AttentionSpec) -> Scores:
    return Scores(spec.scale, spec.window, spec.softcap)


def _requests(chunks: Seq[AttentionChunk], block_size_tokens: int, device: torch.device) -> PagedRequests:
    """All numbers in one copy to the device, each tensor at a multiple of 16 bytes."""
    counts = [-(-chunk.context_len // block_size_tokens) for chunk in chunks]
    width = _aligned(max(counts))
    lengths = [chunk.context_len for chunk in chunks]
    starts = [*accumulate((chunk.num_tokens for chunk in chunks), initial=0)]
    numbers: list[int] = []
    for vector in (lengths, starts):
        numbers += [*vector, *[0] * (_aligned(len(vector)) - len(vector))]
    first_of_tables = len(numbers)
    for chunk, count in zip(chunks, counts, strict=True):
        numbers += [*chunk.block_table[:count], *[0] * (width - count)]
    on_this_device = on_device(numbers, device, torch.int32)
    first_of_starts = _aligned(len(lengths))
    return PagedRequests(
        tables=on_this_device[first_of_tables:].view(len(chunks), width),
        lengths=on_this_device[: len(lengths)],
        query_starts=on_this_device[first_of_starts : first_of_starts + len(starts)],
        max_queries=max(chunk.num_tokens for chunk in chunks),
        max_length=max(lengths),
        block_size_tokens=block_size_tokens,
    )


def _aligned(count: int) -> int:
    return -(-count // ALIGNED_NUMBERS) * ALIGNED_NUMBERS
