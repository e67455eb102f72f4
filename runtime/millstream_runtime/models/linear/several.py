"""Linears that cannot be joined in one weight: parts in several layouts side by side, and quantized experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear


@dataclass(frozen=True, slots=True)
class SideBySideLinear(AddedProduct):
    """Linears of one input, their outputs one after another: see `Linear`."""

    parts: tuple[Linear, ...]
    order: Tensor | None = None  # int64 [out]: output `i` is the parts' output `order[i]`

    @property
    def bias(self) -> Tensor | None:
        biases = [part.bias for part in self.parts]
        found = [one for one in biases if one is not None]
        if len(found) < len(biases):
            return None  # a model has a bias on all parts or on none
        return self._ordered(torch.cat(found))

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        return self._ordered(torch.cat([part(x) for part in self.parts], dim=1))

    def without_bias(self) -> Linear:
        return replace(self, parts=tuple(part.without_bias() for part in self.parts))

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order)
        return replace(self, order=index if self.order is None else self.order[index])

    def _ordered(self, outputs: Tensor) -> Tensor:
        return outputs if self.order is None else outputs.index_select(-1, self.order.to(outputs.device))


@dataclass(frozen=True, slots=True)
class LinearPerExpert:
    """See `ExpertLinears`."""

    linears: Sequence[Linear]

    @property
    def num_experts(self) -> int:
        return len(self.linears)

    def product(self, expert: int, x: Tensor) -> Tensor:
        return self.linears[expert](x)
