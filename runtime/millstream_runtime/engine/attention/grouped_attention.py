"""Attention of a step in which groups of layers have block tables of their own (see `kv_layout`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millstream_runtime.models.layers.attention import Attention, AttentionSpec
from millstream_runtime.models.loading.layer_kernels import PoolPlace


class GroupedAttention:
    """Asks the attention of the layer's group; see `models.attention.Attention`."""

    def __init__(self, groups: Sequence[Attention], group_of: Sequence[int]) -> None:
        """`group_of`: of each layer, its place in `groups`."""
        self._of_layer = [groups[group] for group in group_of]

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, spec: AttentionSpec) -> Tensor:
        return self._of_layer[layer](layer, query, key_value, spec)

    def place(self, layer: int) -> PoolPlace:
        return self._of_layer[layer].place(layer)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        return self._of_layer[layer].attend(layer, query, spec)
