"""Attention of a layer of which no row is read: keys and values are stored, nothing is attended to."""

from __future__ import annotations

from torch import Tensor

from millstream_runtime.engine.attention.pool_attention import PoolAttention
from millstream_runtime.models.layers.attention import AttentionSpec


class NoQueries(PoolAttention):
    """Of the last layer, in a step of prompt chunks that all have others behind them."""

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """`[0, H, D]` to `[0, H * D]`, or to `[0, H * latent_dim]`."""
        _, num_heads, head_dim = query.shape
        return query.new_empty(0, num_heads * (spec.latent_dim or head_dim))
