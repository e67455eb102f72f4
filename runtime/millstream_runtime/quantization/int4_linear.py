"""A linear layer over a weight of 4 bits that a Triton kernel computes with; see `millstream_kernels.linear.w4a16`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from millstream_kernels.linear.int4_weight import SCALES, TILE, UNIT, Int4Weight, is_group_size, repack
from millstream_kernels.linear.w4a16 import w4a16_linear
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight, unpack_halves


@dataclass(frozen=True, slots=True)
class TritonInt4Linear:
    """See `Linear`."""

    weight: Int4Weight
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        return w4a16_linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place."""
        residual.add_(self(x))

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
    size = _group_size(weight)
    if size is None or weight.scales.dtype not in SCALES or weight.num_inputs % UNIT:
        return None
    zeros = weight.zeros
    if isinstance(zeros, Tensor):
        zeros = unpack_halves(zeros, weight.num_outputs)
    codes = unpack_halves(weight.codes, weight.num_outputs)
    return repack(codes, weight.scales.contiguous(), zeros, size, weight.order)


def _group_size(weight: GroupedWeight) -> int | None:
    """Inputs of each group but the last, which may be shorter; None: they differ, or the kernel takes none so long."""
    sizes, groups = [], []
    for group, runs in groupby(weight.runs, lambda run: run[2]):
        groups.append(group)
        sizes.append(sum(stop - start for start, stop, _ in runs))
    if groups != list(range(len(weight.scales))):
        return None
    if len(sizes) == 1:
        return -(-sizes[0] // TILE) * TILE
    size = sizes[0]
    alike = all(one == size for one in sizes[:-1]) and sizes[-1] <= size
    return size if alike and is_group_size(size) else None
