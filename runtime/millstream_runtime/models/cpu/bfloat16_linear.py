"""Bfloat16 weights of layers, held once in the blocks of oneDNN, where the CPU multiplies bfloat16 numbers.

inputs           float32, rounded to bfloat16
one row          by a kernel of ours that reads the same blocks faster and gives the same bits (`bfloat16.one_row`)
result           summed in float32, rounded to bfloat16, widened at once: bias and residual are added in float32
head, TP sums    `sixteen_bits`: their results leave the product in float32
bytes            2 for each number; oneDNN pads the last block of outputs and of inputs, which is not counted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millstream_kernels.cpu.bfloat16.one_row import RowWeight, row_weight
from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
from millstream_runtime.models.cpu.sixteen_bits import SixteenBitLayout
from millstream_runtime.models.cpu.two_layouts import padded_rows
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import Linear

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode


@dataclass(frozen=True, slots=True)
class Bfloat16Linear(AddedProduct):
    """See `Linear`."""

    product: Bfloat16Product
    packed: Tensor  # opaque
    num_inputs: int
    num_outputs: int
    bias: Tensor | None  # [out], float32
    one_row: RowWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`, float32."""
        if len(x) == 1 and self.one_row is not None:
            result = self.one_row.product(x.bfloat16().contiguous())
        else:
            result = self._rounded(x).float()
        return result if self.bias is None else result.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self._rounded(x) if self.bias is None and len(x) > 1 else self(x))

    def without_bias(self) -> Linear:
        return replace(self, bias=None)

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order)
        rows = self.product.operations.unpack(self.packed).index_select(0, index)
        bias = None if self.bias is None else self.bias.index_select(0, index)
        packed = self.product.operations.pack(rows.contiguous())
        one_row = self.one_row and row_weight(
            self.one_row.code, self.product.operations, packed, len(order), self.num_inputs
        )
        return Bfloat16Linear(self.product, packed, self.num_inputs, len(order), bias, one_row)

    def _rounded(self, x: Tensor) -> Tensor:
        """The product in bfloat16, `[T, out]`.

        Rows are padded to one of few numbers, for oneDNN writes code for each, and to as many as it takes for a row to
        have the same bits in any company.
        """
        num_rows = x.shape[0]
        if not num_rows:
            return x.new_empty(0, self.num_outputs, dtype=torch.bfloat16)
        wanted = padded_rows(max(num_rows, self.product.least_rows_of(self.num_inputs)))
        if wanted == num_rows:
            return self.product.operations.product(x.bfloat16(), self.packed)
        padded = torch.zeros(wanted, self.num_inputs, dtype=torch.bfloat16)
        padded[:num_rows] = x
        return self.product.operations.product(padded, self.packed)[:num_rows]


class Bfloat16Layout(SixteenBitLayout):
    """Bfloat16 weights of layers so; all others as `SixteenBitLayout`."""

    def __init__(self, dtype: torch.dtype, copy_budget_bytes: int, code: LoadedCode, product: Bfloat16Product) -> None:
        super().__init__(dtype, copy_budget_bytes, code)
        self._product = product
        self._loaded_code = code
        self._joined = torch.empty(0, dtype=torch.bfloat16)  # where parts are put side by side, until they are packed

    def linear_of_parts(self, parts: Sequence[Tensor], bias: Tensor | None, *, may_round: bool) -> Linear:
        if not may_round or parts[0].dtype is not torch.bfloat16:
            return super().linear_of_parts(parts, bias, may_round=may_round)
        weight = self._side_by_side(parts)
        num_outputs, num_inputs = weight.shape
        self._count_panels(num_outputs, num_inputs)
        packed = self._product.operations.pack(weight)
        one_row = row_weight(self._loaded_code, self._product.operations, packed, num_outputs, num_inputs)
        return Bfloat16Linear(self._product, packed, num_inputs, num_outputs, bias, one_row)

    def _side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """`[out, in]`, contiguous, until the next call: the mapped file where it lies so, else the same memory for all
        layers. What is freed between memory that stays is often not given back."""
        if len(parts) == 1 and parts[0].is_contiguous():
            return parts[0]
        num_elements = sum(part.numel() for part in parts)
        if self._joined.numel() < num_elements:
            self._joined = torch.empty(0, dtype=torch.bfloat16)  # before there are two
            self._joined = torch.empty(num_elements, dtype=torch.bfloat16)
        weight = self._joined[:num_elements].view(-1, parts[0].shape[1])
        return torch.cat(list(parts), out=weight)
