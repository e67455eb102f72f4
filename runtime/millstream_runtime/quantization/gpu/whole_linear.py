"""A linear layer that dequantizes its weight in every product: what a GPU computes where no kernel takes the weight.

    codes -> weight [in, out] in the model's dtype, a few million numbers at a time -> one product by the matrix units

Each number is dequantized in float32 and rounded once. A product moves some 30 bytes per weight instead of the half or
the whole one of its code, so it is several times slower than one by 16-bit weights: it keeps the memory, not the time.
On a CPU `quantized_linear` is quicker, whose runs of rows stay in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight

MOST_ELEMENTS = 1 << 24  # dequantized in float32 at once: 64 MiB


@dataclass(frozen=True, slots=True)
class WholeDequantizingLinear(AddedProduct):
    """See `Linear`. `groups`, int64 `[in]`: the group of each row of the weight."""

    weight: GroupedWeight
    groups: Tensor
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        order = self.weight.order
        inputs = x if order is None else x.index_select(1, order)
        weight = self._dequantized(x.dtype)
        return torch.mm(inputs, weight) if self.bias is None else torch.addmm(self.bias, inputs, weight)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        bias = None if self.bias is None else self.bias[torch.tensor(order, device=self.bias.device)]
        return replace(self, weight=self.weight.with_outputs(order), bias=bias)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        """`[in, out]`, rows in the order of the codes."""
        num_inputs, num_outputs = self.weight.num_inputs, self.weight.num_outputs
        dense = torch.empty(num_inputs, num_outputs, dtype=dtype, device=self.weight.codes.device)
        step = max(1, MOST_ELEMENTS // num_outputs)
        for start in range(0, num_inputs, step):
            stop = min(start + step, num_inputs)
            dense[start:stop] = self.weight.block(start, stop, self.groups[start:stop], dtype)
        return dense


def whole_linear(weight: GroupedWeight, bias: Tensor | None) -> WholeDequantizingLinear:
    """Return the layer of a weight."""
    sizes = torch.tensor([stop - start for start, stop, _ in weight.runs])
    groups = torch.tensor([group for _, _, group in weight.runs]).repeat_interleave(sizes)
    return WholeDequantizingLinear(weight, groups.to(weight.codes.device), bias)
