"""Attention of checks: several queries per sequence, many sequences in one call.

Keys and values are read as for decodes (`decodes`). The queries of a sequence are taken as more heads of its groups, so
that they are read once for all of them. A mask says what each query sees:

    first check    context of 5, one draft     0  0  0  0  -inf -inf      position 3, the last known token
                                               0  0  0  0   0   -inf      position 4, the draft
    second check   context of 6, one draft     0  0  0  0   0   -inf      position 4
                                               0  0  0  0   0    0        position 5

A check with fewer drafts than another of its call repeats its last query. Those rows are dropped.

Of a tree of drafts each query sees the known tokens and the drafts on its own path. Its window, if the layer has one,
is that of its position: the last known token's and its depth.

    context of 6, known ─┬─ a ─── c            0  0  0 -inf -inf -inf     position 2, the last known token
                         └─ b                  0  0  0   0  -inf -inf     position 3, a
                                               0  0  0 -inf   0  -inf     position 3, b
                                               0  0  0   0  -inf   0      position 4, c
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from millstream_runtime.draft_tree import depths
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.decodes import SequenceTokens, attend_padded
from millstream_runtime.engine.attention.masks import line_for, tree_mask
from millstream_runtime.engine.attention.prefill import MASK_LIMIT_BYTES, QUERIES_A_READING, KeptMasks
from millstream_runtime.engine.attention.scaled_dot_product import attend_decodes, keys_values, queries_within
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import AttentionSpec

ALL = slice(None)


class CheckCall:
    """Checks, one after another from row `start` of the step's queries on. On a CPU."""

    def __init__(self, tokens: SequenceTokens, chunks: Seq[AttentionChunk], start: int, kept: KeptMasks) -> None:
        self._tokens, self._lens, self._kept = tokens, tokens.lens, kept
        self._num_queries = [chunk.num_tokens for chunk in chunks]
        self._most_queries = max(self._num_queries)
        self._context_lens = [chunk.context_len for chunk in chunks]
        self._parents = [chunk.parents for chunk in chunks]
        self.rows = slice(start, start + sum(self._num_queries))
        self._is_even = min(self._num_queries) == self._most_queries

    def tokens_read(self, window: int | None) -> int:
        """The time that the call takes, as tokens that a decode would read in it."""
        return self._lens.columns(window) * max(1, self._most_queries // QUERIES_A_READING)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this call's rows."""
        even = query if self._is_even else query.index_select(0, self._places)
        queries = even.view(self._lens.count, self._most_queries, *even.shape[1:])

        def attend(tokens: Tensor) -> Tensor:
            return self._attend(queries, *keys_values(tokens, spec), spec)

        attended = attend_padded(attend, self._tokens.read(pool, spec.window), self._lens.padding(spec.window))
        rows = attended.flatten(0, 1)
        return rows if self._is_even else rows.index_select(0, self._rows_of_queries)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """`queries` `[sequences, most queries, KV, group, D]`; the result too."""
        slabs = [*self._slabs(queries, keys.shape[2], spec)]
        if len(slabs) == 1:  # as nearly always: nothing is cut
            mask = self._kept_mask(*slabs[0], queries.shape[3], spec.window)
            return _attend_as_heads(queries, keys, values, mask, spec)
        pieces = []
        for sequences, places in slabs:
            mask = self._kept_mask(sequences, places, queries.shape[3], spec.window)
            own = queries[sequences, places]
            pieces.append(_attend_as_heads(own, keys[sequences], values[sequences], mask, spec))
        return torch.cat([piece.flatten(0, 1) for piece in pieces]).view(*queries.shape[:4], -1)

    def _slabs(self, queries: Tensor, num_columns: int, spec: AttentionSpec) -> Iterator[tuple[slice, slice]]:
        """Sequences and queries of them whose mask, and scores of a soft cap, stay within their limits, in order."""
        count, num_queries, num_heads, group, _ = queries.shape
        most = max(1, MASK_LIMIT_BYTES // (group * num_columns * queries.element_size()))
        if spec.softcap is not None:
            most = min(most, queries_within(num_heads * group * num_columns, queries.dtype))
        if most >= num_queries:
            step = most // num_queries
            yield from ((slice(one, min(one + step, count)), ALL) for one in range(0, count, step))
            return
        for one in range(count):
            for first in range(0, num_queries, most):
                yield slice(one, one + 1), slice(first, min(first + most, num_queries))

    def _kept_mask(self, sequences: slice, places: slice, group: int, window: int | None) -> Tensor:
        key = (self.rows.start, self.rows.stop, window, group, *_ends(sequences), *_ends(places))
        return self._kept.get(key, lambda: self._mask(sequences, places, group, window))

    def _mask(self, sequences: slice, places: slice, group: int, window: int | None) -> Tensor:
        """`[sequences, 1, queries * group, columns]`: every row is a piece of the same line (see `masks`)."""
        first, longest = self._lens.first(window), self._lens.longest
        line, end = line_for(longest, window, self._lens.like)
        starts = [end - length + first for one in self._query_lens[sequences] for length in one[places]]
        pieces = line.unfold(0, longest - first, 1)
        rows = on_device(starts, line.device).repeat_interleave(group)
        mask = pieces.index_select(0, rows).view(len(self._query_lens[sequences]), 1, -1, longest - first)
        for own, index in zip(mask, range(*sequences.indices(self._lens.count)), strict=True):
            if parents := self._parents[index]:
                of_drafts = tree_mask(parents, window, line.dtype)
                queries = [min(place, len(parents)) for place in range(self._most_queries)[places]]
                stop = self._context_lens[index] - first
                own[0, :, stop - len(parents) : stop] = of_drafts[queries].repeat_interleave(group, dim=0)
        return mask

    @cached_property
    def _query_lens(self) -> list[list[int]]:
        """How many tokens each query of each sequence sees, without a window."""
        most = self._most_queries
        return [
            [length - queries + 1 + behind[min(place, queries - 1)] for place in range(most)]
            for length, queries, behind in zip(self._context_lens, self._num_queries, self._behind_first, strict=True)
        ]

    @cached_property
    def _behind_first(self) -> list[Seq[int]]:
        """How many positions behind the first query of its check each query is."""
        return [
            [0, *depths(parents)] if parents else range(queries)
            for queries, parents in zip(self._num_queries, self._parents, strict=True)
        ]

    @cached_property
    def _places(self) -> Tensor:
        """Rows of the queries, for each sequence as many: `[sequences * most queries]`."""
        starts = accumulate(self._num_queries, initial=0)
        return on_device(
            [
                start + min(place, queries - 1)
                for start, queries in zip(starts, self._num_queries, strict=False)
                for place in range(self._most_queries)
            ],
            self._lens.like.device,
        )

    @cached_property
    def _rows_of_queries(self) -> Tensor:
        """Where the queries are among `_places`: `[rows]`."""
        most = self._most_queries
        rows = [index * most + place for index, queries in enumerate(self._num_queries) for place in range(queries)]
        return on_device(rows, self._lens.like.device)


def _ends(one: slice) -> tuple[int | None, int | None]:
    return one.start, one.stop


def _attend_as_heads(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """`queries` `[sequences, n, KV, group, D]` over `[sequences, KV, columns, D]`, as n * group heads of each group."""
    count, num_queries, num_heads, group, head_dim = queries.shape
    heads = queries.transpose(1, 2).reshape(count, num_heads, num_queries * group, head_dim)
    attended = attend_decodes(heads, keys, values, mask, spec)
    return attended.view(count, num_heads, num_queries, group, -1).transpose(1, 2)
