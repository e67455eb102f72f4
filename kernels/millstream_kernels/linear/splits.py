"""How the inputs of a weight are split among programs, and the sum of what they found, in one order for every batch.

    inputs   | split 0 | split 1 | .. |      each a program's own sum, float32
    output   ((0 + sum 0) + sum 1) + ..

Where splits end follows from the weight's shape alone, never from the number of rows: a row of a product has one
result. A program that computes all splits itself adds them in the same order. Atomic additions would come in any order.

Bytes:  4 * splits * M * N written and read: of a weight of 4 bits, 8 * splits * 2 * M / K of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.variant import TensorCores, Variant

TILE = 128  # outputs and inputs; a split has whole tiles
ENOUGH_PROGRAMS = 256  # about two for each multiprocessor of an H100 or A100
LEAST_TILES = 4  # of a split: fewer would not hide the latency of the first
MOST_SPLITS = 16
SUM_BLOCK, SUM_WARPS = 1024, 4


@dataclass(frozen=True, slots=True)
class Splits:
    """Of the inputs of one weight."""

    count: int
    tiles: int  # of each but the last


def splits_of(num_outputs: int, num_inputs: int) -> Splits:
    """Return how a weight is split: enough programs for a GPU where it has few outputs."""
    output_tiles, input_tiles = triton.cdiv(num_outputs, TILE), triton.cdiv(num_inputs, TILE)
    wanted = min(triton.cdiv(ENOUGH_PROGRAMS, output_tiles), input_tiles // LEAST_TILES, MOST_SPLITS)
    tiles = triton.cdiv(input_tiles, max(1, wanted))
    return Splits(triton.cdiv(input_tiles, tiles), tiles)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "width_tiles", "splits", "has_bias"])
def sum_splits(
    partials,
    bias,
    output,
    num_rows,
    num_outputs,
    width_tiles,
    splits,
    has_bias,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`BLOCK` outputs of one row. `partials`: `[splits, M, width_tiles * TILE]`."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    width = width_tiles * TILE
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        places = (split * num_rows.to(tl.int64) + row) * width + columns
        total += tl.load(partials + places, mask=inside, other=0.0)
    inside = columns < num_outputs
    total += tl.load(bias + columns, mask=inside & (has_bias != 0), other=0.0).to(tl.float32)
    tl.store(output + row * num_outputs + columns, total.to(output.dtype.element_ty), mask=inside)


def add_splits(partials: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """`output[m, n] = partials[0, m, n] + partials[1, m, n] + .. + bias[n]`, rounded once.

    Args:
        partials: `[splits, M, N up to whole tiles]`, float32, contiguous.
        output: `[M, N]`, contiguous.
    """
    splits, num_rows, width = partials.shape
    sum_splits[(triton.cdiv(width, SUM_BLOCK), num_rows)](
        partials,
        output if bias is None else bias,
        output,
        num_rows,
        output.shape[1],
        width // TILE,
        splits,
        int(bias is not None),
        TILE=TILE,
        BLOCK=SUM_BLOCK,
        num_warps=SUM_WARPS,
    )


def sum_splits_variants() -> Iterator[Variant]:
    """One per type of the output; a variant serves every size."""
    for dtype in ("bf16", "fp16"):
        arguments = {"partials": "*fp32", "bias": f"*{dtype}", "output": f"*{dtype}"}
        integers = dict.fromkeys(sum_splits.arg_names[3:8], "i32")
        constants = {"TILE": TILE, "BLOCK": SUM_BLOCK}
        yield Variant(dtype, sum_splits, arguments | integers, constants, TensorCores.NONE, SUM_WARPS)
