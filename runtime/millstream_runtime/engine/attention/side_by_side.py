"""Which decodes or checks of a step torch computes in one call.

equally long, an equal distance apart    all, over a strided view of the pool
else                                     as many as one padded copy of GATHER_LIMIT_BYTES holds
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.decodes import GatheredTokens, SequenceTokens, StridedTokens
from millstream_runtime.engine.kv.kv_cache import KVCache

# What one gathered call copies of a layer's keys and values, unless a single sequence is longer.
GATHER_LIMIT_BYTES = 64 << 20

Parts = Iterator[tuple[slice, SequenceTokens]]
"""Neighbouring chunks and how their keys and values are read, in order."""


def side_by_side(cache: KVCache, chunks: list[AttentionChunk]) -> Parts:
    """Cut decodes, or checks, in order, into calls."""
    if cache.is_in_place and _are_one_view(chunks):
        yield slice(0, len(chunks)), StridedTokens(cache, chunks)
        return
    # A GPU has no room for what dequantizing takes beyond the limit; on a CPU `step_memory` counts it.
    token_bytes = cache.token_bytes if cache.like.device.type == "cpu" else cache.copied_token_bytes
    most_tokens = GATHER_LIMIT_BYTES // token_bytes
    start = longest = 0
    for index, chunk in enumerate(chunks):
        longest = max(longest, chunk.context_len)
        if index > start and longest * (index + 1 - start) > most_tokens:
            yield slice(start, index), GatheredTokens(cache, chunks[start:index])
            start, longest = index, chunk.context_len
    yield slice(start, len(chunks)), GatheredTokens(cache, chunks[start:])


def _are_one_view(chunks: list[AttentionChunk]) -> bool:
    """Whether they lie an equal distance apart in the pool, and a view of them has no padding."""
    distances = {after.block_table[0] - before.block_table[0] for before, after in pairwise(chunks)}
    sizes = {(chunk.context_len, chunk.num_tokens) for chunk in chunks}
    is_even = len(sizes) == 1 and len(distances) <= 1 and min(distances, default=1) > 0
    return is_even and all(chunk.is_contiguous for chunk in chunks)
