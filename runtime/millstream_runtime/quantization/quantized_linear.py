"""A linear layer over a `GroupedWeight`: dequantized run by run in every product, or once where memory has room.

Both compute `x @ weight` in the model's dtype at every number of rows, so that a row's result depends on neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight


@dataclass(frozen=True, slots=True)
class DequantizingLinear(AddedProduct):
    """See `Linear`. A product needs memory for one run of dequantized weights."""

    weight: GroupedWeight
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        wide = torch.promote_types(x.dtype, torch.float32)  # sums of runs are rounded once
        inputs = x.to(wide) if self.weight.order is None else x.index_select(1, self.weight.order).to(wide)
        total = inputs.new_zeros(x.shape[0], self.weight.num_outputs)
        for run in self.weight.runs:
            total.addmm_(inputs[:, run[0] : run[1]], self.weight.rows(run, wide))
        return (total if self.bias is None else total.add_(self.bias)).to(x.dtype)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        bias = None if self.bias is None else self.bias[torch.tensor(order, device=self.bias.device)]
        return DequantizingLinear(self.weight.with_outputs(order), bias)


@dataclass(frozen=True, slots=True)
class PlannedLinear:
    """Stands for a quantized layer on the meta device, where only names and bytes are asked for."""

    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        raise NotImplementedError

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        return self
