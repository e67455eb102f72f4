"""All decodes of a step on a CPU: as few calls as their places in the pool and their lengths allow.

    queries, in the order of their groups ─► a call per group over a view of the pool, or over a copy ─► back in order

With 128 rows of mixed lengths a step has some 30 groups in every layer, so what a call costs besides its reading counts
as much as what it reads: whatever does not depend on the layer is kept from one to the next, and one look at the result
says whether all numbers are finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from millstream_runtime.engine.attention.decodes import SequenceTokens
from millstream_runtime.engine.attention.scaled_dot_product import attend_decodes, keys_values
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import AttentionSpec

Group = tuple[Seq[int], SequenceTokens]
"""Rows of the batch, and how their keys and values are read."""


class DecodeBatch:
    """Decodes, one query each, from row `start` of the step's queries on."""

    def __init__(self, groups: Seq[Group], start: int) -> None:
        """`groups`: each row of the batch is in one of them."""
        self._tokens = [tokens for _, tokens in groups]
        order = [row for rows, _ in groups for row in rows]
        self.rows = slice(start, start + len(order))
        ends = [*accumulate((len(rows) for rows, _ in groups), initial=0)]
        self._places = [slice(*ends_of_group) for ends_of_group in pairwise(ends)]
        self._order = self._back = None
        if order != [*range(len(order))]:
            device = self._tokens[0].lens.like.device
            back = sorted(range(len(order)), key=order.__getitem__)
            self._order, self._back = on_device(order, device), on_device(back, device)

    def tokens_read(self, window: int | None) -> int:
        """What the largest of its calls reads of a layer with that window."""
        return max(tokens.lens.columns(window) for tokens in self._tokens)

    def __call__(self, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[rows, KV, group, D]`, of this batch's rows."""
        ordered = query if self._order is None else query.index_select(0, self._order)
        calls = zip(self._places, self._tokens, strict=True)
        pieces = [self._attend(tokens, pool, ordered[place], spec) for place, tokens in calls]
        attended = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if any(tokens.lens.is_ragged for tokens in self._tokens) and not math.isfinite(attended.sum().item()):
            attended = self._without_padding(pool, ordered, attended, spec)
        return attended if self._back is None else attended.index_select(0, self._back)

    def _attend(self, tokens: SequenceTokens, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = keys_values(tokens.read(pool, spec.window), spec)
        return attend_decodes(query, keys, values, tokens.lens.seen(spec.window)[1], spec)

    def _without_padding(self, pool: LayerPool, ordered: Tensor, attended: Tensor, spec: AttentionSpec) -> Tensor:
        """`attended`, with rows computed again one by one where their group has numbers that are not finite."""
        pieces: list[Tensor] = []
        for place, tokens in zip(self._places, self._tokens, strict=True):
            lens = tokens.lens
            if not lens.is_ragged or math.isfinite(attended[place].sum().item()):
                pieces.append(attended[place])
                continue
            keys, values = keys_values(tokens.read(pool, spec.window), spec)
            queries = ordered[place]
            for row in range(lens.count):
                own, columns = slice(row, row + 1), lens.columns_of(row, spec.window)
                pieces.append(attend_decodes(queries[own], keys[own, :, columns], values[own, :, columns], None, spec))
        return torch.cat(pieces)
