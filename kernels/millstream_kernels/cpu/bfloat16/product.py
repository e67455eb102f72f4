"""oneDNN's product of bfloat16 numbers, where a CPU has instructions for it (AVX512_BF16, AMX).

    weight   bfloat16 [out, in], once, in blocks that oneDNN chooses: opaque
    x        bfloat16 [rows, in]
    result   bfloat16 [rows, out]: summed in float32, rounded once

Nothing is believed of a processor: `check` compares results before a layer uses the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millstream_kernels.cpu import executable_memory

# For how many rows oneDNN chooses the blocks of a weight. Those for a prompt's chunk are the best for a few rows, too.
PACKED_FOR_ROWS = 512
# From so many inputs on oneDNN divides one row's sum among threads; then the row has other bits than among others.
MANY_INPUTS = 2048


class Operations(Protocol):
    """What computes."""

    def refusal(self) -> str | None:
        """Why this machine has no such product; None: it says that it has one."""

    def pack(self, weight: Tensor) -> Tensor:
        """`weight` bfloat16 `[out, in]`, contiguous, in memory of its own: opaque."""

    def unpack(self, packed: Tensor) -> Tensor:
        """The weight `[out, in]` again."""

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        """`x` bfloat16 `[rows, in]` times the weight, bfloat16 `[rows, out]`; at least one row."""


class OneDNN:
    """See `Operations`: the functions of torch that `torch.compile` uses for the same."""

    def refusal(self) -> str | None:
        if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return "this torch has no oneDNN"
        # torch calls bfloat16 supported wherever there is AVX-512; without the instructions it is emulated, slowly.
        has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        if not has_instructions or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "the CPU lacks AVX512_BF16 and AMX"
        return executable_memory.refusal()  # oneDNN writes machine code

    def pack(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.to_dense()

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return result


@dataclass(frozen=True, slots=True)
class Bfloat16Product:
    """A product that passed its check.

    Attributes:
        least_rows: so many are computed at least, with zeros behind them, so that a row has the same bits alone as
            among others.
        least_rows_of_many: the same of weights with MANY_INPUTS or more.
    """

    operations: Operations
    least_rows: int
    least_rows_of_many: int

    def least_rows_of(self, num_inputs: int) -> int:
        """Return how many rows are computed at least by a weight of so many inputs."""
        return self.least_rows_of_many if num_inputs >= MANY_INPUTS else self.least_rows
