"""What every attention over the KV pool shares: keys and values are stored first, then attended to."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.layers.attention import AttentionSpec
from millstream_runtime.models.loading.layer_kernels import PoolPlace


class PoolAttention(ABC):
    """Attention of one step; see `models.attention.Attention`."""

    def __init__(self, cache: KVCache, slots: Tensor) -> None:
        """`slots`: `[T]` int64, the slot in the pool of every new token."""
        self._cache = cache
        self._slots = slots

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, spec: AttentionSpec) -> Tensor:
        self._cache.layer(layer).write(self._slots, key_value)
        return self.attend(layer, query, spec)

    def place(self, layer: int) -> PoolPlace:
        stored, scales = self._cache.layer(layer).tensors
        return PoolPlace(stored, scales, self._slots)

    @abstractmethod
    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor: ...
