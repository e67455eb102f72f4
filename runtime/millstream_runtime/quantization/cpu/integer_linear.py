"""A layer whose rows are rounded to 8 bits per 32 inputs and multiplied as integers by codes of 4 to 8 bits.

Inputs and results are float32. A row's result has the same bits in any company and with any number of threads; see
`millstream_kernels.cpu.integer.product_kernel`. The weight is held once, in the bits of its codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_kernels.cpu.integer.check import IntegerProduct
from millstream_kernels.cpu.integer.weight import IntegerWeight
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear


@dataclass(frozen=True, slots=True)
class IntegerLinear(AddedProduct):
    """See `Linear`."""

    product: IntegerProduct
    weight: IntegerWeight
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[T, in]` to `[T, out]`."""
        result = self.product.product(x, self.weight)
        return result if self.bias is None else result.add_(self.bias)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        bias = None if self.bias is None else self.bias.index_select(0, torch.tensor(order))
        return IntegerLinear(self.product, self.weight.with_outputs(order), bias)
