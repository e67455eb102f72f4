"""Prompt chunks by a kernel that was compiled for the CPU: one call for all chunks of a step, wherever blocks lie.

Nothing is gathered, masked or dequantized in memory, and a query has one result, whatever its company and however its
prompt is cut into chunks of several tokens. A chunk of one token is a decode (`compiled_decodes`), whose sums have
another order. The kernel takes what that of decodes takes; checks and trees of drafts are not its.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millstream_kernels.cpu.pools import DTYPES
from millstream_kernels.cpu.prefill import PagedPrompts
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.prefill import prompt_tokens_read
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.models.layers.attention import AttentionSpec

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode


class CompiledPrompts:
    """Chunks of several tokens, from row `start` of the step's queries on."""

    def __init__(self, code: LoadedCode, cache: KVCache, chunks: Seq[AttentionChunk], start: int) -> None:
        """`chunks`: each `is_taken`."""
        self._chunks = chunks
        num_tokens = [chunk.num_tokens for chunk in chunks]
        tables, lengths = [chunk.block_table for chunk in chunks], [chunk.context_len for chunk in chunks]
        self._prompts = PagedPrompts(code, tables, lengths, num_tokens, cache.block_size_tokens)
        self.rows = slice(start, start + sum(num_tokens))

    def tokens_read(self, window: int | None) -> int:
        """The time that the call takes, as tokens that a decode would read in it."""
        return sum(prompt_tokens_read(chunk, window) for chunk in self._chunks)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[tokens, KV, group, D]`, of this call's rows; of a latent key `[tokens, 1, H, latent_dim]`."""
        return self._prompts.attend(
            query,
            *pool.tensors,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            latent_size=spec.latent_dim,
            num_threads=torch.get_num_threads(),
        )


def is_taken(chunk: AttentionChunk) -> bool:
    """Whether the kernel computes the chunk: several tokens that follow one another."""
    return chunk.num_tokens > 1 and not chunk.parents


def unsupported(dtype: torch.dtype) -> str | None:
    """Why the kernel does not take a model that computes in `dtype`; None: it does."""
    return None if dtype in DTYPES else f"dtype {str(dtype).removeprefix('torch.')}"
