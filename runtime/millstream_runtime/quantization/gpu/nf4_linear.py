"""A linear layer over a weight in NF4 by a Triton kernel; see `millstream_kernels.linear.nf4`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_kernels.linear.nf4 import GROUP, Nf4Weight, nf4_linear
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, group_size, unpack_halves


@dataclass(frozen=True, slots=True)
class TritonNf4Linear(AddedProduct):
    """See `Linear`."""

    weight: Nf4Weight
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        return nf4_linear(x, self.weight, self.bias)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order, device=self.weight.codes.device)
        weight = replace(self.weight, codes=self.weight.codes[index], absmax=self.weight.absmax[index])
        return TritonNf4Linear(weight, None if self.bias is None else self.bias[index])


def nf4_weight(weight: GroupedWeight) -> Nf4Weight | None:
    """The weight as the kernel reads it, with scales in float32; None where it does not take it: other formats, rows
    that are no whole groups of 64."""
    if weight.bits != 4 or weight.values is None or weight.order is not None or weight.columns is not None:
        return None
    if group_size(weight) != GROUP or weight.num_inputs % GROUP:
        return None
    codes = unpack_halves(weight.codes, weight.num_outputs).t()
    pairs = (codes[:, ::2] << 4) | codes[:, 1::2]
    return Nf4Weight(pairs.contiguous(), weight.scales.float().t().contiguous(), weight.values.float())
