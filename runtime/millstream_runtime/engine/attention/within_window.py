"""Attention that reads no further back than a window, whatever window the layer has itself."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from millstream_runtime.models.layers.attention import Attention, AttentionSpec


class WithinWindow:
    """Of a draft model whose target keeps no older tokens; see `models.attention.Attention`."""

    def __init__(self, attention: Attention, window_tokens: int) -> None:
        self._attention, self._window_tokens = attention, window_tokens

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.window is None or spec.window > self._window_tokens:
            spec = replace(spec, window=self._window_tokens)
        return self._attention(layer, query, key_value, spec)
