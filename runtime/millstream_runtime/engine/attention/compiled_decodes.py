"""Decodes and checks by a kernel that was compiled for the CPU: one call, which reads blocks wherever they lie.

    decode of a context of 7                a row that sees 7 tokens
    check of the same, with two drafts      rows that see 7, 8 and 9 tokens, of the same table

Nothing is padded, gathered or masked, and a row's result knows no other row: a row of a check has the bits that its
decode would have. The kernel takes models in float32, bfloat16 and float16, also those with a latent key (MLA), with
keys and values as they are or in 8 bits, and sums in float32. Trees of drafts are torch's (`checks`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millstream_kernels.cpu.decode import PagedDecodes
from millstream_kernels.cpu.pools import DTYPES
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.models.layers.attention import AttentionSpec

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode


# Queries of one check, which read the same keys one after another: 16 drafts and the last known token. Where a prompt's
# last tokens are in the same chunk there may be more; reading once for all of them is quicker then.
MOST_QUERIES = 17


class CompiledDecodes:
    """Decodes and checks, one row per query, from row `start` of the step's queries on."""

    def __init__(self, code: LoadedCode, cache: KVCache, chunks: Seq[AttentionChunk], start: int) -> None:
        """`chunks`: each `is_taken`."""
        rows = [(chunk.block_table, length) for chunk in chunks for length in _lengths(chunk)]
        tables, lengths = [table for table, _ in rows], [length for _, length in rows]
        self._decodes = PagedDecodes(code, tables, lengths, cache.block_size_tokens)
        self.rows = slice(start, start + len(rows))

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._decodes.tokens_read(window)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows; of a latent key `[rows, 1, H, latent_dim]`."""
        return self._decodes.attend(
            query,
            *pool.tensors,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            latent_size=spec.latent_dim,
            num_threads=torch.get_num_threads(),
        )


def is_taken(chunk: AttentionChunk) -> bool:
    """Whether the kernel computes the chunk: a decode, or a check whose drafts follow one another."""
    is_check = chunk.num_drafts > 0 and not chunk.parents and chunk.num_tokens <= MOST_QUERIES
    return chunk.num_tokens == 1 or is_check


def _lengths(chunk: AttentionChunk) -> range:
    """How many tokens each query of the chunk sees."""
    return range(chunk.context_len - chunk.num_tokens + 1, chunk.context_len + 1)


def unsupported(dtype: torch.dtype) -> str | None:
    """Why the kernel does not take a model that computes in `dtype`; None: it does."""
    return None if dtype in DTYPES else f"dtype {str(dtype).removeprefix('torch.')}"
