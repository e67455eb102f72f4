"""A layer over a `CodeTable`: 4 bits, and 8 bits with scales per group. Inputs, products and sums are float32."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.cpu.code_table import CodeTable


@dataclass(frozen=True, slots=True)
class TableLinear(AddedProduct):
    """See `Linear`."""

    weight: CodeTable
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[T, in]` to `[T, out]`."""
        product = self.weight.product(x)
        return product if self.bias is None else product.add_(self.bias)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        bias = None if self.bias is None else self.bias.index_select(0, torch.tensor(order))
        return TableLinear(self.weight.with_outputs(order), bias)
