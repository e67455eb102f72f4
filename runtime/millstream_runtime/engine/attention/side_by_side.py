"""Which decodes or checks of a step are computed in one call.

Sequences that lie an equal distance apart in the pool are read in place, others are gathered.

Sequences share a call with padding up to the longest context and, for checks, up to the most queries. What padding
costs is weighed against the calls that it saves. Decodes on a CPU may share a call in any order; checks, and decodes
elsewhere, only with their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.decode_batch import Group
from millstream_runtime.engine.attention.decode_groups import PoolRows, groups_of
from millstream_runtime.engine.attention.decodes import GatheredTokens, SequenceTokens, StridedTokens
from millstream_runtime.engine.attention.prefill import QUERIES_A_READING
from millstream_runtime.engine.kv.kv_cache import KVCache

# What one gathered call copies of a layer's keys and values, unless a single sequence is longer.
GATHER_LIMIT_BYTES = 64 << 20
# A call reads every row up to the longest. A row that joins it saves a call, which costs about as much time as reading
# this much; more where other processes want the cores, since the threads of each call wait for each other.
CALL_BYTES = 512 << 10

Parts = Iterator[tuple[slice, SequenceTokens]]
"""Neighbouring chunks and how their keys and values are read, in order."""


def decode_groups(cache: KVCache, chunks: list[AttentionChunk]) -> list[Group]:
    """Group decodes on a CPU: in their order, or in any other where that saves more than changing it takes."""
    call_tokens = CALL_BYTES // cache.token_bytes
    in_order: list[Group] = [(range(part.start, part.stop), tokens) for part, tokens in side_by_side(cache, chunks)]
    if len(in_order) == 1:
        return in_order
    in_any_order = [*_in_any_order(cache, chunks, call_tokens)]

    def cost_tokens(groups: list[Group]) -> int:
        return sum(call_tokens + tokens.lens.columns(None) for _, tokens in groups)

    return in_any_order if cost_tokens(in_any_order) + call_tokens < cost_tokens(in_order) else in_order


def _in_any_order(cache: KVCache, chunks: list[AttentionChunk], call_tokens: int) -> Iterator[Group]:
    """By distances and lengths, or by lengths alone where they are gathered."""
    block = cache.block_size_tokens
    at_home = [row for row, chunk in enumerate(chunks) if cache.is_in_place and chunk.is_contiguous]
    first_slots = [chunks[row].block_table[0] * block for row in at_home]
    lengths = [chunks[row].context_len for row in at_home]
    for members in groups_of(PoolRows(first_slots, lengths, cache.num_blocks * block), call_tokens):
        own = [chunks[at_home[member]] for member in members]
        homes = [chunk.block_table[0] for chunk in own]
        yield [at_home[member] for member in members], StridedTokens(cache, own, homes)
    elsewhere = sorted({*range(len(chunks))} - {*at_home}, key=lambda row: -chunks[row].context_len)
    if elsewhere:
        own = [chunks[row] for row in elsewhere]
        for part, tokens in _gathered(cache, own, slice(0, len(own)), call_tokens):
            yield elsewhere[part], tokens


def side_by_side(cache: KVCache, chunks: list[AttentionChunk]) -> Parts:
    """Cut decodes, or checks, in order, into strided calls and gathered ones."""
    if cache.like.device.type != "cpu":
        yield from _without_padding(cache, chunks)
        return
    call_tokens = CALL_BYTES // cache.token_bytes
    if not cache.is_in_place:
        yield from _gathered(cache, chunks, slice(0, len(chunks)), call_tokens)
        return
    start = 0
    while start < len(chunks):
        homes = _strided_run(chunks[start:], cache, call_tokens)
        if homes:
            stop = start + len(homes)
            yield slice(start, stop), StridedTokens(cache, chunks[start:stop], homes)
        else:
            stop = next((i for i in range(start + 1, len(chunks)) if chunks[i].is_contiguous), len(chunks))
            yield from _gathered(cache, chunks, slice(start, stop))
        start = stop


def _without_padding(cache: KVCache, chunks: list[AttentionChunk]) -> Parts:
    """One strided call where all sequences are equally long; else gathered copies, whose padding can be set to 0."""
    homes = _strided_run(chunks, cache, 0) if cache.is_in_place else []
    everything = slice(0, len(chunks))
    if len(homes) == len(chunks):
        yield everything, StridedTokens(cache, chunks, homes)
    else:
        yield from _gathered(cache, chunks, everything)


class _Padding:
    """What a call reads of padding, in tokens of a decode: further queries count as in `PromptCall.tokens_read`."""

    def __init__(self) -> None:
        self.longest = self._most_readings = self._total = 0

    def joined(self, chunk: AttentionChunk, num_chunks: int) -> int:
        """Let a chunk join, so that there are `num_chunks`; return the padding of all."""
        readings = max(1, chunk.num_tokens // QUERIES_A_READING)
        self.longest = max(self.longest, chunk.context_len)
        self._most_readings = max(self._most_readings, readings)
        self._total += chunk.context_len * readings
        return self.longest * self._most_readings * num_chunks - self._total


def _gathered(cache: KVCache, chunks: list[AttentionChunk], part: slice, call_tokens: int | None = None) -> Parts:
    """As few calls as copy no more than GATHER_LIMIT_BYTES each.

    `call_tokens`: the padding that a call may have for each call that it saves; None is no bound.
    """
    # A GPU has no room for what dequantizing takes beyond the limit; on a CPU `step_memory` counts it.
    token_bytes = cache.token_bytes if cache.like.device.type == "cpu" else cache.copied_token_bytes
    most_tokens = GATHER_LIMIT_BYTES // token_bytes
    start, padding = part.start, _Padding()
    for index in range(part.start, part.stop):
        num_rows = index - start
        padded = padding.joined(chunks[index], num_rows + 1)
        copied = padding.longest * (num_rows + 1)
        if num_rows and (copied > most_tokens or (call_tokens is not None and padded > call_tokens * num_rows)):
            yield slice(start, index), GatheredTokens(cache, chunks[start:index])
            start, padding = index, _Padding()
            padding.joined(chunks[index], 1)
    yield slice(start, part.stop), GatheredTokens(cache, chunks[start : part.stop])


def _strided_run(chunks: Seq[AttentionChunk], cache: KVCache, call_tokens: int) -> list[int]:
    """First blocks of the longest start of `chunks` that one strided view covers; [] if `chunks[0]` is scattered.

    The view needs contiguous sequences at equal distances, no more padding than `call_tokens` for each call that it
    saves, and to end inside the pool.
    """
    homes: list[int] = []
    padding = _Padding()
    for chunk in chunks:
        home = chunk.block_table[0]
        padded = padding.joined(chunk, len(homes) + 1)
        if not chunk.is_contiguous or (homes and home <= homes[-1]):
            break
        if len(homes) >= 2 and home - homes[-1] != homes[1] - homes[0]:
            break
        if padded > call_tokens * len(homes):
            break
        if home * cache.block_size_tokens + padding.longest > cache.num_blocks * cache.block_size_tokens:
            break
        homes.append(home)
    return homes
