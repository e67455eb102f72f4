"""The target's hidden states of all tokens in its KV pool, by slot: an EAGLE head reads them in place of the layers.

They stand under the block tables of the keys, so whatever happens to those happens to them: a prefix that the cache
knows has its states, what is preempted is written again, and a draft that fell is overwritten by the token that came.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millstream_runtime.engine.transfer import on_device


class HiddenStatePool:
    """`[slots, layers * hidden]`: the residual stream before each of some layers, side by side."""

    def __init__(
        self,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor],
        layers: tuple[int, ...],
    ) -> None:
        """`zeros(shape, dtype)` allocates a tensor. `layers`: by number; the number of layers: behind the last."""
        self._states = zeros((num_slots, len(layers) * hidden_size), dtype)
        self._columns = [
            (layer, self._states[:, place * hidden_size : (place + 1) * hidden_size])
            for place, layer in enumerate(layers)
        ]

    @property
    def num_bytes(self) -> int:
        return self._states.numel() * self._states.element_size()

    def write(self, slots: Tensor, layer: int, residual: Tensor) -> None:
        """Keep `residual` `[T, hidden]`, before `layer`, at `slots` `[T]` int64, if it is one of the layers."""
        for kept, column in self._columns:
            if kept == layer:
                column.index_copy_(0, slots, residual)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy what is kept in slots. `sources`, `targets`: int64 `[n]`; they may overlap."""
        self._states.index_copy_(0, targets, self._states.index_select(0, sources))

    def read(self, slots: list[int]) -> Tensor:
        """`[len(slots), layers * hidden]`, a copy."""
        return self._states.index_select(0, on_device(slots, self._states.device))
