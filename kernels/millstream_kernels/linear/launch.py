"""How a linear kernel is started: tiles of the tuning table, splits of the weight, grid, and the sum of splits.

    LinearPlan     block_rows, warps, stages of the table; splits of the weight's shape
    grid            tiles of rows, tiles of outputs, splits
    the kernel      writes_partials: float32 `[splits, M, tiles * TILE]`, which `add_splits` adds; else `[M, N]`

Every kernel takes its operands, the bias, the output, its numbers and its constants, in this order. What these are,
and the mathematics, stand in the file of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.linear.splits import TILE, Splits, add_splits, splits_of
from millstream_kernels.tuning.candidates import FEW_ROWS, SPLIT_ROWS
from millstream_kernels.tuning.table import tiles_for

FLOATS = {torch.bfloat16, torch.float16, torch.float32}  # of activations that are not quantized, and of outputs
Constants = Mapping[str, int | bool]


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How a product is computed. `splits` follows from the weight alone; the rest changes no bit of a row."""

    block_rows: int
    num_warps: int
    num_stages: int
    splits: Splits
    writes_partials: bool

    def grid(self, num_rows: int, num_outputs: int) -> tuple[int, int, int]:
        """Tiles of rows, tiles of outputs, and splits: one program each."""
        splits = self.splits.count if self.writes_partials else 1
        return triton.cdiv(num_rows, self.block_rows), triton.cdiv(num_outputs, TILE), splits


def plan_product(
    table_name: str,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    capability: int,
    *,
    whole_weight_rows: int = FEW_ROWS,
) -> LinearPlan:
    """Return how `num_rows` rows are multiplied by a weight.

    Args:
        table_name: the kernel in the tuning tables.
        capability: 80 for sm_80.
        whole_weight_rows: up to how many rows partial sums are written where the weight has one split. Those of few
            rows are small: one variant less to compile for weights with many outputs.
    """
    splits = splits_of(num_outputs, num_inputs)
    tiles = tiles_for(table_name, num_rows, capability)
    writes_partials = num_rows <= (SPLIT_ROWS if splits.count > 1 else whole_weight_rows)
    return LinearPlan(tiles.block_rows, tiles.num_warps, tiles.num_stages, splits, writes_partials)


def require_bias(bias: Tensor | None, num_outputs: int, dtype: torch.dtype) -> None:
    """`[N]`, dense, in the type of x. Raises: KernelArgumentError."""
    if bias is not None:
        require_tensor("bias", bias, (num_outputs,), {dtype})
        require_unit_stride("bias", bias)


def output_or_new(
    output: Tensor | None, num_rows: int, num_outputs: int, dtypes: set[torch.dtype], like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `output`, or `[M, N]` of `dtype` on the device of `like`.

    Raises:
        KernelArgumentError: `output` has another shape, no type of `dtypes`, or is not contiguous.
    """
    if output is None:
        output = torch.empty((num_rows, num_outputs), dtype=dtype, device=like.device)
    require_tensor("output", output, (num_rows, num_outputs), dtypes)
    require(output.is_contiguous(), "output", "is not contiguous")
    return output


def launch(
    kernel: Any,
    own: LinearPlan,
    grid: tuple[int, ...],
    operands: tuple[Tensor, ...],
    bias: Tensor | None,
    output: Tensor,
    numbers: tuple[int | float, ...],
    constants: Constants,
) -> None:
    """Start `kernel`, and add its partial sums where it writes them. It reads the bias only where `numbers` say so."""
    target = output
    if own.writes_partials:
        partials = (own.splits.count, output.shape[0], triton.cdiv(output.shape[1], TILE) * TILE)
        target = torch.empty(partials, dtype=torch.float32, device=output.device)
    kernel[grid](
        *operands,
        output if bias is None else bias,
        target,
        *numbers,
        **constants,
        num_warps=own.num_warps,
        num_stages=own.num_stages,
    )
    if own.writes_partials:
        add_splits(target, bias, output)
