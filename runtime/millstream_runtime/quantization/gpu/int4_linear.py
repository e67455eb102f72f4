"""A linear layer over a weight of 4 bits that a Triton kernel computes with; see `millstream_kernels.linear.w4a16`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_kernels.linear.int4_weight import SCALES, TILE, UNIT, Int4Weight, is_group_size, repack
from millstream_kernels.linear.w4a16 import w4a16_linear
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, group_size, unpack_halves


@dataclass(frozen=True, slots=True)
class TritonInt4Linear(AddedProduct):
    """See `Linear`."""

    weight: Int4Weight
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        return w4a16_linear(x, self.weight, self.bias)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order, device=self.weight.codes.device)
        bias = None if self.bias is None else self.bias[index]
        return TritonInt4Linear(self.weight.with_outputs(index), bias)


def int4_weight(weight: GroupedWeight) -> Int4Weight | None:
    """The weight as the kernel reads it; None where it does not take it: other bits or scales, NF4's values, groups of
    other sizes, as a rank's share of an act-order has them."""
    if weight.bits != 4 or weight.values is not None or weight.columns is not None:
        return None
    size = group_size(weight)
    if size is None or weight.scales.dtype not in SCALES or weight.num_inputs % UNIT:
        return None
    if len(weight.scales) == 1:
        size = -(-size // TILE) * TILE
    if not is_group_size(size):
        return None
    zeros = weight.zeros
    if isinstance(zeros, Tensor):
        zeros = unpack_halves(zeros, weight.num_outputs)
    codes = unpack_halves(weight.codes, weight.num_outputs)
    return repack(codes, weight.scales.contiguous(), zeros, size, weight.order)
