"""Weights of 16 bits, held once on a CPU: a linear layer, and a table that may be the output head as well.

    in the file              bfloat16 or float16 `[out, in]`
    in memory                the same numbers in panels of 16 outputs (`millstream_kernels.cpu.product`)
    bytes                    2 for each number; outputs are padded to a multiple of 16
    inputs, sums, outputs    float32

A result depends neither on the other rows of a step nor on the number of threads, bit for bit: every number of rows
goes through the same kernel. A tied head and the embedding are one tensor: a token's row is read out of the panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millstream_kernels.cpu.product import num_panels, pack, packed_product, panels_bytes, rows_of, unpack
from millstream_kernels.cpu.task import PANEL_OUTPUTS
from millstream_runtime.models.cpu.linear import CpuLayout
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import DenseLinear, Linear
from millstream_runtime.models.linear.tables import Table

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode


@dataclass(frozen=True, slots=True)
class SixteenBitLinear(AddedProduct):
    """See `Linear`."""

    code: LoadedCode
    panels: Tensor  # [panels, in, 16]
    num_outputs: int
    bias: Tensor | None  # [out], float32

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`, float32."""
        product = packed_product(self.code, x, self.panels, self.num_outputs)
        return product if self.bias is None else product.add_(self.bias)

    def without_bias(self) -> Linear:
        return SixteenBitLinear(self.code, self.panels, self.num_outputs, None)

    def reordered(self, order: list[int]) -> Linear:
        index = torch.tensor(order)
        rows = unpack(self.panels, self.num_outputs).index_select(0, index)
        bias = None if self.bias is None else self.bias.index_select(0, index)
        return SixteenBitLinear(self.code, _packed([rows]), len(order), bias)


@dataclass(frozen=True, slots=True)
class SixteenBitTable:
    """See `Table`."""

    head: SixteenBitLinear

    @property
    def num_rows(self) -> int:
        return self.head.num_outputs

    def __call__(self, rows: Tensor) -> Tensor:
        return rows_of(self.head.panels, rows).float()

    def as_head(self) -> Linear:
        return self.head


class SixteenBitLayout(CpuLayout):
    """Holds weights of 16 bits so. Those that come as a dense float32 weight, quantized ones, are `CpuLayout`'s.

    On the meta device nothing is packed, and the bytes are counted all the same.
    """

    holds_sixteen_bits = True

    def __init__(self, dtype: torch.dtype, copy_budget_bytes: int, code: LoadedCode | None) -> None:
        """`code`: None on the meta device."""
        super().__init__(dtype, copy_budget_bytes)
        self._code = code

    def linear_of_parts(self, parts: Sequence[Tensor], bias: Tensor | None, *, may_round: bool) -> Linear:
        num_outputs, num_inputs = sum(map(len, parts)), parts[0].shape[1]
        self._count_panels(num_outputs, num_inputs)
        if self._code is None:
            return DenseLinear(torch.empty(num_inputs, num_outputs, dtype=parts[0].dtype, device="meta"), bias)
        return SixteenBitLinear(self._code, _packed(parts), num_outputs, bias)

    def table_and_head(self, rows: Tensor) -> Table | None:
        linear = self.linear_of_parts([rows], None, may_round=False)
        return SixteenBitTable(linear) if isinstance(linear, SixteenBitLinear) else None

    def _count_panels(self, num_outputs: int, num_inputs: int) -> None:
        self.copy_bytes += panels_bytes(num_outputs, num_inputs)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Panels of weights `[out, in]` of one type, one behind another."""
    num_outputs, num_inputs = sum(map(len, parts)), parts[0].shape[1]
    panels = torch.empty(num_panels(num_outputs), num_inputs, PANEL_OUTPUTS, dtype=parts[0].dtype)
    panels[-1:].zero_()  # outputs that fill no panel
    first = 0
    for part in parts:
        pack(part, panels, first)
        first += len(part)
    return panels
