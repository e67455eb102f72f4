"""A linear layer of 8-bit activations by an 8-bit weight, by Triton kernels; see `millstream_kernels.linear.w8a8`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_kernels.elementwise.codes import Codes
from millstream_kernels.elementwise.quantize_rows import MAX_SIZE, UNIT, quantize_rows
from millstream_kernels.linear.w8a8 import w8a8_linear
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight


@dataclass(frozen=True, slots=True)
class TritonInt8Linear(AddedProduct):
    """See `Linear`. Each row of the input is quantized by its own largest number."""

    codes: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]
    bias: Tensor | None  # [out]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel() * self.scales.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        rows = quantize_rows(x, Codes.INT8)
        return w8a8_linear(rows.codes, rows.scales, self.codes, self.scales, self.bias, dtype=x.dtype)

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order, device=self.codes.device)
        bias = None if self.bias is None else self.bias[index]
        return TritonInt8Linear(self.codes[index], self.scales[index], bias)


def int8_linear(weight: GroupedWeight, bias: Tensor | None) -> TritonInt8Linear | None:
    """The layer of a weight; None where the format asks for no 8-bit activations, or the kernels do not take it."""
    if not weight.quantizes_activations or weight.codes.dtype != torch.int8 or weight.order is not None:
        return None
    is_symmetric = isinstance(weight.zeros, int) and not weight.zeros
    if not is_symmetric or len(weight.scales) != 1 or weight.num_inputs % UNIT or weight.num_inputs > MAX_SIZE:
        return None
    scales = weight.scales[0] if weight.columns is None else weight.scales[0].index_select(0, weight.columns)
    return TritonInt8Linear(weight.codes.t().contiguous(), scales.float().contiguous(), bias)
