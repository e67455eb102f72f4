"""Paged attention by torch alone: one plan per step, used by every layer.

The plan sorts the step's work once, so that a layer makes as few calls as possible and copies nothing it can view:

    decodes in regions  rows an equal distance apart in the pool -> one strided view of the pool, one call
    decodes elsewhere   blocks gathered into a padded batch, one call
    prompt chunks       one call each, over a view (contiguous blocks) or a gathered copy

On CUDA, FlashAttention takes all decodes at home in one call, all such chunks in another (`varlen_attention`).

Query heads that share a key/value head are taken as rows of one query (`[.., KV, group, D]`), so that keys and
values are read once and never repeated. A layer with a sliding window reads only the tokens within it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.varlen_attention import VarlenCall
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import AttentionSpec

# A strided call reads every row up to the longest. Rows join it while the padding costs less than a call of their own.
PADDING_LIMIT_TOKENS = 256
# Scores of a prompt chunk are masked in slabs of queries, so that the mask stays below this.
MASK_LIMIT_ELEMENTS = 4 << 20
# Queries of a chunk whose arithmetic takes about as long as reading their keys and values from memory.
QUERIES_A_READING = 4
# In a larger chunk the arithmetic binds, not the reading of keys and values.
MOST_MERGED_QUERIES = 32

KVRead = Callable[[int], AbstractContextManager[None]]
"""Returns a context for a call that reads this many bytes of the KV pool; see `DevicePolicy.kv_read`."""


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """`num_tokens` new tokens of one sequence, the last of `context_len` cached ones."""

    num_tokens: int
    context_len: int
    block_table: Seq[int]
    is_contiguous: bool  # whether each block of the table follows the one before it


class TorchAttention:
    """Attention of one step. Chunks of one token come first, in the order of the query's rows."""

    def __init__(
        self, cache: KVCache, slots: Tensor, chunks: Seq[AttentionChunk], kv_read: KVRead | None = None
    ) -> None:
        """`slots`: `[T]` int64, the slot in the pool of every new token."""
        self._cache = cache
        self._kv_read = kv_read
        self._slots = slots
        self._chunks = chunks
        self._longest = max((chunk.context_len for chunk in chunks), default=0)
        self._may_use_varlen = varlen_attention.can_read(cache.heads[0])
        self._plans: dict[bool, list[_Call]] = {}  # with calls of `varlen_attention` or without

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `models.attention.Attention`."""
        pool = self._cache.heads[layer]
        pool.index_copy_(1, self._slots, key_value.transpose(0, 1))
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

    def _calls(self, spec: AttentionSpec) -> list[_Call]:
        use_varlen = self._may_use_varlen and varlen_attention.can_compute(spec, self._longest)
        if use_varlen not in self._plans:
            self._plans[use_varlen] = _plan(self._cache, self._chunks, use_varlen=use_varlen)
        return self._plans[use_varlen]

    def _attend(self, call: _Call, pool: Tensor, query: Tensor, spec: AttentionSpec) -> Tensor:
        if self._kv_read is None:
            return call(pool, query, spec)
        token_bytes = pool.shape[0] * pool.shape[2] * pool.element_size()
        with self._kv_read(call.tokens_read(spec.window) * token_bytes):
            return call(pool, query, spec)


class _StridedDecode:
    """Decodes whose sequences lie an equal distance apart in the pool, read in place."""

    def __init__(self, cache: KVCache, chunks: list[AttentionChunk], homes: list[int], start: int) -> None:
        block = cache.block_size_tokens
        self.rows = slice(start, start + len(chunks))
        self._first_slot = homes[0] * block
        self._stride_slots = (homes[1] - homes[0]) * block if len(homes) > 1 else 0
        self._lens = _Lengths([chunk.context_len for chunk in chunks], cache.heads[0])

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._lens.columns(window)

    def __call__(self, pool: Tensor, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows."""
        first, mask = self._lens.seen(spec.window)
        head, slot, element = pool.stride()
        num_heads = 1 if spec.latent_dim else pool.shape[0] // 2
        size = (self._lens.count, num_heads, self._lens.longest - first, pool.shape[2])
        stride = (self._stride_slots * slot, head, slot, element)
        offset = (self._first_slot + first) * slot
        keys = pool.as_strided(size, stride, offset)
        values = keys if spec.latent_dim else pool.as_strided(size, stride, offset + num_heads * head)
        return _attend_decodes(query, keys, values, mask, spec)


class _GatheredDecode:
    """Decodes whose blocks lie anywhere: copied side by side, padded to the longest."""

    def __init__(self, cache: KVCache, chunks: list[AttentionChunk], start: int) -> None:
        self.rows = slice(start, start + len(chunks))
        self._lens = _Lengths([chunk.context_len for chunk in chunks], cache.heads[0])
        width = -(-self._lens.longest // cache.block_size_tokens)
        # Padding names block 0: any finite memory will do, the mask takes it out.
        tables = [[*chunk.block_table[:width], *[0] * (width - len(chunk.block_table))] for chunk in chunks]
        self._blocks = on_device(tables, cache.heads[0].device)
        self._block_size_tokens = cache.block_size_tokens

    def tokens_read(self, window: int | None) -> int:
        """What the call reads of a layer with that window."""
        return self._lens.columns(window)

    def __call__(self, pool: Tensor, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`."""
        first, mask = self._lens.seen(spec.window)
        first_block = first // self._block_size_tokens
        gathered = _gather(pool, self._blocks[:, first_block:], self._block_size_tokens)
        skipped = first_block * self._block_size_tokens
        tokens = gathered[:, :, first - skipped : self._lens.longest - skipped]
        return _attend_decodes(query, *keys_values(tokens, spec), mask, spec)


class _Prefill:
    """Several new tokens of one sequence: causal among themselves, open to everything before them in the window."""

    def __init__(self, cache: KVCache, chunk: AttentionChunk, start: int) -> None:
        self._chunk = chunk
        self.rows = slice(start, start + chunk.num_tokens)
        self._block_size_tokens = cache.block_size_tokens
        self._like = cache.heads[0]
        self._slabs: dict[int | None, list[_Slab]] = {}
        self._merged_masks: dict[tuple[int | None, int], Tensor] = {}  # by window and heads of a group

    @cached_property
    def _blocks(self) -> Tensor:
        return on_device([self._chunk.block_table], self._like.device)

    def tokens_read(self, window: int | None) -> int:
        """The time that the call takes, as tokens that a decode would read in it: it computes, where a decode waits."""
        num_tokens, context_len = self._chunk.num_tokens, self._chunk.context_len
        seen = context_len if window is None else min(context_len, window + num_tokens)
        return seen * max(1, num_tokens // QUERIES_A_READING)

    def __call__(self, pool: Tensor, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[num_tokens, KV, group, D]`."""
        context_len = self._chunk.context_len
        if self._chunk.is_contiguous:
            first = self._chunk.block_table[0] * self._block_size_tokens
            tokens = pool[:, first : first + context_len]
        else:
            tokens = _gather(pool, self._blocks, self._block_size_tokens)[0, :, :context_len]
        # Heads take the place of the batch, and the group that of the heads, over keys that are not repeated.
        rows = query.permute(1, 2, 0, 3)  # [KV, group, num_tokens, D]
        window = None if spec.window is None or spec.window >= context_len else spec.window
        is_small = self._chunk.num_tokens <= MOST_MERGED_QUERIES and self._chunk.num_tokens < context_len
        if is_small and len(slabs := self._slabs_of(window)) == 1:
            return self._merged(rows, *keys_values(tokens[:, slabs[0].keys], spec), window, spec)
        keys, values = (part.unsqueeze(1).expand(-1, rows.shape[1], -1, -1) for part in keys_values(tokens, spec))
        if self._chunk.num_tokens == context_len and window is None and spec.softcap is None:
            attended = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=spec.scale)
        else:
            attended = torch.cat(
                [
                    attend(rows[:, :, slab.queries], keys[:, :, slab.keys], values[:, :, slab.keys], slab.mask, spec)
                    for slab in self._slabs_of(window)
                ],
                dim=2,
            )
        return attended.permute(2, 0, 1, 3)

    def _merged(self, rows: Tensor, keys: Tensor, values: Tensor, window: int | None, spec: AttentionSpec) -> Tensor:
        """The heads of a group as more queries of one head, which reads its keys and values once for all of them.

        Behind a long context, reading is what a small chunk costs.
        """
        num_heads, group, num_tokens, head_dim = rows.shape
        if (window, group) not in self._merged_masks:
            (slab,) = self._slabs_of(window)
            self._merged_masks[window, group] = slab.mask.repeat(group, 1)
        queries = rows.reshape(1, num_heads, group * num_tokens, head_dim)
        attended = attend(queries, keys[None], values[None], self._merged_masks[window, group], spec)
        return attended.view(num_heads, group, num_tokens, -1).permute(2, 0, 1, 3)

    def _slabs_of(self, window: int | None) -> list[_Slab]:
        if window not in self._slabs:
            self._slabs[window] = _slabs(self._chunk.num_tokens, self._chunk.context_len, window, self._like)
        return self._slabs[window]


_Call = _StridedDecode | _GatheredDecode | _Prefill | VarlenCall


class _Lengths:
    """Context lengths of decodes side by side, and which of their columns a window leaves to be seen."""

    def __init__(self, lens: list[int], like: Tensor) -> None:
        self.count, self.longest = len(lens), max(lens)
        self._lens = lens
        self._like = like
        self._seen: dict[int | None, tuple[int, Tensor | None]] = {}

    def seen(self, window: int | None) -> tuple[int, Tensor | None]:
        """The first column that any row sees, and a mask `[rows, 1, 1, longest - first]`; None where all see all.

        The mask is 0 on what a row sees and minus infinity elsewhere, in the cache's dtype.
        """
        if window not in self._seen:
            starts = [0 if window is None else max(0, length - window) for length in self._lens]
            first, ragged = min(starts), len(set(self._lens)) > 1
            self._seen[window] = first, self._mask(window, first) if ragged else None
        return self._seen[window]

    def columns(self, window: int | None) -> int:
        """Of all rows together, padding included, those that a window leaves to be seen."""
        return self.count * (self.longest - self.seen(window)[0])

    def _mask(self, window: int | None, first: int) -> Tensor:
        """Every row of the mask is a piece of the same line, found by where its zeros end: one operation for all."""
        most = 1 << (self.longest - 1).bit_length()  # so that the line lasts for many steps
        line, end = _mask_line(most, window, self._like.dtype, self._like.device)
        pieces = line.unfold(0, self.longest - first, 1)
        starts = on_device([end - length + first for length in self._lens], line.device)
        return pieces.index_select(0, starts)[:, None, None, :]


@lru_cache(maxsize=32)
def _mask_line(most_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    """What a row at the end of its window adds to the scores of the tokens before, in and after it, and where `after`
    begins:

        -inf ... -inf   0 ... 0          -inf ... -inf
                        window (or all)  ^ a row of n tokens has its first n places before this
    """
    zeros = most_tokens if window is None else min(window, most_tokens)
    line = torch.full((2 * most_tokens,), float("-inf"), dtype=dtype, device=device)
    line[most_tokens - zeros : most_tokens] = 0.0
    return line, most_tokens


@dataclass(frozen=True, slots=True)
class _Slab:
    """Some queries of a chunk, the keys that any of them sees, and what is added to the scores: `[queries, keys]`."""

    queries: slice
    keys: slice
    mask: Tensor


def _slabs(num_tokens: int, context_len: int, window: int | None, like: Tensor) -> list[_Slab]:
    """Cut the queries of a chunk so that no mask grows beyond MASK_LIMIT_ELEMENTS."""
    step = max(1, MASK_LIMIT_ELEMENTS // context_len)
    line, line_end = _mask_line(1 << (context_len - 1).bit_length(), window, like.dtype, like.device)
    slabs = []
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        first_position, end = context_len - num_tokens + start, context_len - num_tokens + stop
        first_key = 0 if window is None else max(0, first_position - window + 1)
        first_piece = line_end - (first_position + 1) + first_key  # of the first query; the next one's is before it
        pieces = torch.arange(first_piece, first_piece - (stop - start), -1, device=like.device)
        mask = line.unfold(0, end - first_key, 1).index_select(0, pieces)
        slabs.append(_Slab(slice(start, stop), slice(first_key, end), mask))
    return slabs


def _plan(cache: KVCache, chunks: Seq[AttentionChunk], *, use_varlen: bool) -> list[_Call]:
    """The calls for all chunks, in the order of their rows."""
    calls: list[_Call] = []
    row = 0
    for (is_prompt, is_varlen), group in groupby(
        chunks, lambda chunk: (chunk.num_tokens > 1, use_varlen and chunk.is_contiguous)
    ):
        alike = list(group)
        if is_varlen:
            calls.append(VarlenCall(cache, alike, row))
        elif is_prompt:
            starts = accumulate((chunk.num_tokens for chunk in alike), initial=row)
            calls += [_Prefill(cache, chunk, start) for chunk, start in zip(alike, starts, strict=False)]
        else:
            calls += _plan_decodes(cache, alike, row)
        row += sum(chunk.num_tokens for chunk in alike)
    return calls


def _plan_decodes(
    cache: KVCache, chunks: list[AttentionChunk], first_row: int
) -> list[_StridedDecode | _GatheredDecode]:
    """Cut the decodes, in order, into strided groups and gathered ones."""
    calls: list[_StridedDecode | _GatheredDecode] = []
    start = 0
    while start < len(chunks):
        homes = _strided_run(chunks[start:], cache)
        if homes:
            stop = start + len(homes)
            calls.append(_StridedDecode(cache, chunks[start:stop], homes, first_row + start))
        else:
            stop = next((i for i in range(start + 1, len(chunks)) if chunks[i].is_contiguous), len(chunks))
            calls.append(_GatheredDecode(cache, chunks[start:stop], first_row + start))
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


def _gather(pool: Tensor, blocks: Tensor, block_size_tokens: int) -> Tensor:
    """A copy of blocks: `pool` `[heads, tokens, D]` and `blocks` `[rows, n]` to `[rows, heads, n blocks of tokens, D]`.

    Every head of a block is one run of memory, and they are copied as such.
    """
    num_heads, num_tokens, head_dim = pool.shape
    num_rows, width = blocks.shape
    starts = torch.arange(num_heads, device=pool.device)[:, None] * (num_tokens // block_size_tokens)
    runs = pool.view(-1, block_size_tokens * head_dim).index_select(0, (blocks[:, None, :] + starts).view(-1))
    return runs.view(num_rows, num_heads, width * block_size_tokens, head_dim)


def keys_values(heads: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Keys and values of pool heads: `[.., 2 * KV, tokens, D]`, or 1 for MLA.

    A latent row is the key and, but for its last elements, the value too. It is used whole as both: the kernels want
    equal sizes, and the caller drops the rest.
    """
    if spec.latent_dim:
        return heads, heads
    keys, values = heads.chunk(2, dim=-3)
    return keys, values


def _attend_decodes(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """`attend` for one new token a row. On a CPU it calls the kernel that torch would choose: choosing is a fifth of
    the call at batch 1."""
    if spec.softcap is None and query.device.type == "cpu":
        attended, _ = torch._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=spec.scale
        )
        return attended
    return attend(query, keys, values, mask, spec)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """`query` `[.., group, D]` over `keys`, `values` `[.., tokens, D]`; `mask`: added to the scores."""
    if spec.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    scores = torch.matmul(query, keys.mT).mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    if mask is not None:
        scores = scores.add_(mask)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.matmul(scores.softmax(dim=-1, dtype=wide).to(query.dtype), values)
