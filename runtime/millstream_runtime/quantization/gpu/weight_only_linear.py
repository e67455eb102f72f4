"""A linear layer over an 8-bit weight alone, FP8 or INT8, by a Triton kernel; see `millstream_kernels.linear.w8a16`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_kernels.linear.splits import TILE
from millstream_kernels.linear.w8a16 import UNIT, w8a16_linear
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, group_size

SIGN_BIT = 128  # codes of 8 bits whose zero point this is are those of an int8


@dataclass(frozen=True, slots=True)
class TritonWeightOnlyLinear(AddedProduct):
    """See `Linear`."""

    codes: Tensor  # [out, in] int8, or uint8: the bits of float8_e4m3fn
    scales: Tensor  # float32 [groups, out]
    bias: Tensor | None  # [out]
    group_size: int | None  # of inputs; None: all
    order: Tensor | None  # int32 [in]: column `k` multiplies input `order[k]`

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.scales, self.order)
        return sum(one.numel() * one.element_size() for one in tensors if one is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        return w8a16_linear(x, self.codes, self.scales, self.bias, group_size=self.group_size)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order, device=self.codes.device)
        bias = None if self.bias is None else self.bias[index]
        return replace(self, codes=self.codes[index], scales=self.scales[:, index].contiguous(), bias=bias)


def weight_only_linear(weight: GroupedWeight, bias: Tensor | None) -> TritonWeightOnlyLinear | None:
    """The layer of a weight; None where the kernel does not take it: zero points, groups that end within a tile."""
    codes, size = weight.codes, group_size(weight)
    if weight.bits != 8 or isinstance(weight.zeros, Tensor) or weight.num_inputs % UNIT or size is None:
        return None
    if codes.dtype == torch.uint8 and weight.zeros == SIGN_BIT:
        codes = (codes ^ SIGN_BIT).view(torch.int8)
    elif weight.zeros or codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        return None
    if len(weight.scales) > 1 and size % TILE:
        return None
    if codes.dtype != torch.int8:
        codes = codes.view(torch.uint8)
    scales = weight.scales if weight.columns is None else weight.scales.index_select(1, weight.columns)
    length = None if len(scales) == 1 else size
    return TritonWeightOnlyLinear(codes.t().contiguous(), scales.float().contiguous(), bias, length, weight.order)
