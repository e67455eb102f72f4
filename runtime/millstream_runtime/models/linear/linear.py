"""A linear layer, and how the weights of all linear layers of a model are laid out.

Projection     what a layer calls: a weight whole, or spread over ranks
Linear         one product by `[in, out]`, the layout that a GPU and the meta device use
WeightLayout   makes the `Linear` of a loaded weight: one object per model, chosen by device in `weight_layouts`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Projection(Protocol):
    """A linear as a layer sees it: its weight whole, or spread over ranks."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight + bias`."""

    weight: Tensor  # [in, out], of any strides
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place, as one product."""
        residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)

    def reordered(self, order: list[int]) -> Linear:
        """The same with output `i` taken from output `order[i]`."""
        weight, bias = self._reordered_tensors(order)
        return Linear(weight.contiguous(), bias)

    def _reordered_tensors(self, order: list[int]) -> tuple[Tensor, Tensor | None]:
        """Weight `[in, out]`, contiguous as `[out, in]`, and bias in the new order."""
        index = torch.tensor(order, device=self.weight.device)
        bias = None if self.bias is None else self.bias.index_select(0, index)
        return self.weight.t().index_select(0, index).t(), bias


class WeightLayout(Protocol):
    """How a device wants the weights of linear layers in memory."""

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies of weights that `linear` has made so far."""

    def is_output_major(self, num_elements: int) -> bool:
        """Whether a weight of that size is to lie in memory as `[out, in]`, as in a checkpoint, not as `[in, out]`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer of a `weight` `[in, out]`, with the copies of it that this device computes with."""


class PlainLayout:
    """`[in, out]` and no copies."""

    copy_bytes = 0

    def is_output_major(self, num_elements: int) -> bool:
        return False

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(weight, bias)
