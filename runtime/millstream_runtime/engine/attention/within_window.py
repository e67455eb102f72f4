"""Attention that reads no further back than a window, whatever window the layer has itself."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from millstream_runtime.models.layers.attention import Attention, AttentionSpec
from millstream_runtime.models.loading.layer_kernels import PoolPlace


class WithinWindow:
    """Of a draft model whose target keeps no older tokens; see `models.attention.Attention`."""

    def __init__(self, attention: Attention, window_tokens: int) -> None:
        self._attention, self._window_tokens = attention, window_tokens

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, spec: AttentionSpec) -> Tensor:
        return self._attention(layer, query, key_value, self._narrowed(spec))

    def place(self, layer: int) -> PoolPlace:
        return self._attention.place(layer)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        return self._attention.attend(layer, query, self._narrowed(spec))

    def _narrowed(self, spec: AttentionSpec) -> AttentionSpec:
        if spec.window is not None and spec.window <= self._window_tokens:
            return spec
        return replace(spec, window=self._window_tokens)
