"""A linear layer.

On a CPU the layout of a weight decides what a product costs, and no layout is the best for all of them:

    float32, room for a copy   as in the checkpoint for one row, in oneDNN's blocks for more   `two_layouts`
    otherwise                  `[in, out]`: `x @ W` walks memory in order; in parts on several threads   `split_product`
    held by float16            copies of half the size besides, for steps of few rows   `half_weights`

A GPU is content with `[in, out]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millstream_runtime.models.cpu import two_layouts
from millstream_runtime.models.cpu.half_weights import HalfWeight, half_copy
from millstream_runtime.models.cpu.split_product import num_parts, split_product


class Projection(Protocol):
    """A linear as a layer sees it: its weight whole, or spread over ranks."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight + bias`; `weight`: `[in, out]`; the same again, `half`: from `half_weights.half_copy`, `packed`: from
    `two_layouts.pack`."""

    weight: Tensor
    bias: Tensor | None
    half: HalfWeight | None = None
    packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        if self.half is not None and (product := self.half.product(x)) is not None:
            return product if self.bias is None else product.add_(self.bias)
        if self.packed is not None:
            return two_layouts.product(x, self.weight, self.packed, self.bias)
        if (parts := num_parts(x, self.weight)) > 1:
            product = split_product(x, self.weight, parts)
            return product if self.bias is None else product.add_(self.bias)
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place, as one product where there is one that adds."""
        if self.half is not None or self.packed is not None:
            residual.add_(self(x))
            return
        if (parts := num_parts(x, self.weight)) > 1:
            residual.add_(split_product(x, self.weight, parts))
        else:
            residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)

    def reordered(self, order: list[int]) -> Linear:
        """The same with output `i` taken from output `order[i]`."""
        index = torch.tensor(order, device=self.weight.device)
        bias = None if self.bias is None else self.bias.index_select(0, index)
        weight = self.weight.t().index_select(0, index).t()
        packed = two_layouts.pack(weight) if self.packed is not None else None
        if packed is None:
            weight = weight.contiguous()
        return Linear(weight, bias, None if self.half is None else half_copy(weight), packed)
