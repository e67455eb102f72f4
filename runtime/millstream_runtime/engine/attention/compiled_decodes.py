"""Decodes by a kernel that was compiled for the CPU: one call for all rows, which reads blocks wherever they lie.

Nothing is padded, gathered or masked, and a row's result knows no other row, so none of what `decode_groups` weighs
arises. The kernel takes float32, as it is stored, and no latent key; the rest is torch's (`decode_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millstream_kernels.cpu.decode import PagedDecodes
from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.models.layers.attention import AttentionSpec

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode


class CompiledDecodes:
    """Decodes, one query each, from row `start` of the step's queries on."""

    def __init__(self, code: LoadedCode, cache: KVCache, chunks: Seq[AttentionChunk], start: int) -> None:
        tables = [chunk.block_table for chunk in chunks]
        lengths = [chunk.context_len for chunk in chunks]
        self._decodes = PagedDecodes(code, tables, lengths, cache.block_size_tokens)
        self.rows = slice(start, start + len(chunks))

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._decodes.tokens_read(window)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows."""
        return self._decodes.attend(
            query,
            pool.in_place,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            num_threads=torch.get_num_threads(),
        )


def unsupported(pool_heads: int, dtype: torch.dtype, stored: KVCacheDType) -> str | None:
    """Why the kernel does not take a pool of `pool_heads` heads; None: it does."""
    if stored is not KVCacheDType.AUTO:
        return f"keys and values are stored as {stored.value}"
    if pool_heads % 2:
        return "heads share a latent key (MLA)"
    return None if dtype is torch.float32 else f"dtype {str(dtype).removeprefix('torch.')}"
