"""FlashAttention over the KV pool in place: torch's kernel for sequences of different lengths, one call for all.

The kernel reads on the device where each sequence begins in the pool and how long it is. Nothing is gathered, padded to
the longest, or masked, and a CUDA graph can replay the call:

    pool           | a0 a1 a2 a3 . . . | b0 b1 . . . . . |     [tokens, KV, D], a view
    first_slots      ^ lengths[0] = 4    ^ lengths[1] = 2

It takes 16-bit numbers on CUDA, sequences whose blocks follow one another, and layers that attend to all tokens before.
Everything else is left to `attention.TorchAttention` and `static_decode.StaticAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.attention import AttentionSpec

MAX_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)


class PlacedChunk(Protocol):
    """`num_tokens` new tokens of one sequence, the last of `context_len` cached ones."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def context_len(self) -> int: ...
    @property
    def block_table(self) -> Seq[int]: ...


@dataclass(frozen=True, slots=True)
class PlacedSequences:
    """Sequences in the pool. Each has its queries one after another, the last tokens of the sequence."""

    query_starts: Tensor  # [n + 1] int32, rows of the query; the last is the number of rows
    first_slots: Tensor  # [n + 1] int32, the pool place of each sequence's first token; the last is never used
    lengths: Tensor  # [n] int32, tokens in the cache, at least 1
    max_queries: int
    max_length: int

    @classmethod
    def of(cls, chunks: Seq[PlacedChunk], block_size_tokens: int, device: torch.device) -> PlacedSequences:
        """Of chunks whose blocks follow one another."""
        count = len(chunks)
        starts = accumulate((chunk.num_tokens for chunk in chunks), initial=0)
        slots = (chunk.block_table[0] * block_size_tokens for chunk in chunks)
        lengths = [chunk.context_len for chunk in chunks]
        numbers = on_device([*starts, *slots, 0, *lengths], device, torch.int32)
        return cls(
            numbers[: count + 1],
            numbers[count + 1 : 2 * count + 2],
            numbers[2 * count + 2 :],
            max(chunk.num_tokens for chunk in chunks),
            max(lengths),
        )


class VarlenCall:
    """Some chunks of an eager step, decodes or prompts, whose blocks follow one another: one call a layer."""

    def __init__(self, cache: KVCache, chunks: Seq[PlacedChunk], first_row: int) -> None:
        self.rows = slice(first_row, first_row + sum(chunk.num_tokens for chunk in chunks))
        self._placed = PlacedSequences.of(chunks, cache.block_size_tokens, cache.like.device)

    def tokens_read(self, window: int | None) -> int:
        """0: no CPU runs this call, so it needs no threads."""
        return 0

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows."""
        return attend(pool.in_place, query.flatten(1, 2), self._placed, spec).view(query.shape)


def can_read(pool: Tensor) -> bool:
    """Whether the kernel takes a layer's pool `[heads, tokens, D]`."""
    return (
        pool.is_cuda
        and pool.dtype in (torch.float16, torch.bfloat16)
        and pool.shape[2] <= MAX_HEAD_DIM
        and pool.shape[2] % 8 == 0
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(pool.device) >= LEAST_CAPABILITY
    )


def can_serve(config: ModelConfig, pool: Tensor) -> bool:
    """Whether the kernel takes all layers of a model, whatever the lengths."""
    return config.has_plain_attention and can_read(pool)


def can_compute(spec: AttentionSpec, max_length: int) -> bool:
    """Whether the kernel computes what a layer asks for sequences of up to `max_length` tokens.

    A window that ends within a sequence is not left to it: the kernel multiplies values outside the window, which may
    belong to another request by then, by 0, and 0 * NaN is NaN.
    """
    return spec.softcap is None and spec.latent_dim is None and (spec.window is None or spec.window >= max_length)


def attend(pool: Tensor, query: Tensor, placed: PlacedSequences, spec: AttentionSpec) -> Tensor:
    """`query` `[T, H, D]` over its sequences in a layer's pool, `[2 * KV, tokens, D]`; returns `[T, H, D]`."""
    keys, values = (half.transpose(0, 1) for half in pool.chunk(2))
    return flash_attention(query, keys, values, placed, spec.scale)


def flash_attention(query: Tensor, keys: Tensor, values: Tensor, placed: PlacedSequences, scale: float) -> Tensor:
    """`query` `[T, H, D]` over `keys`, `values` `[tokens, KV, D]`, each query causal within its sequence."""
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        placed.query_starts,
        placed.first_slots,
        placed.max_queries,
        placed.max_length,
        0.0,  # dropout
        placed.max_queries > 1,  # causal, aligned to the last query and the last key
        False,  # no debug mask
        scale=scale,
        seqused_k=placed.lengths,
    )[0]
    return attended
