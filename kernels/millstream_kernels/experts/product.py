"""Rows times the weight of their expert, all experts in one launch: a grouped product.

Mathematics, for row r of a tile of expert e (see `placement`), s(r) the row of x that belongs to it:

    y[r, n] = sum over k of  x[s(r), k] * W[e, k, n]
    gated:  y[r, n] = silu(sum over k of x[s(r), k] * W[e, k, n]) * (sum over k of x[s(r), k] * W[e, k, N + n])

    x         gathered by the assignments (first product), or in the order of the rows (second)
    one program    16 or 64 rows x 128 outputs of one expert, all K in one order, float32; gate and up together

A row's sums run over K in steps of 64 whatever tile it is in, so it has one result at every number of rows; as in
`w4a16` this takes for granted that a matrix unit sums alike for 16 and 64 rows. Grids are upper bounds: a program whose
tile has no expert ends at once, and nothing is read back.

Bytes:  2 * K * N of each expert that is chosen, once per 64 rows; K and N per row.
FLOPs:  2 * K * N per row, 4 when gated.   Memory-bound up to about 200 rows per expert.

Gale et al. 2022 (MegaBlocks, arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.experts.placement import ROWS, Placement
from millstream_kernels.variant import TensorCores, Variant

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
UNIT = 8  # sizes and strides are passed in units of 8 numbers: 16 bytes of 16 bits
BLOCK_INPUTS = 64


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """Follows from the rows of a tile alone."""

    block_outputs: int
    num_warps: int
    num_stages: int


def plan(rows: int, is_gated: bool) -> ProductPlan:
    """Return how tiles of `rows` are computed."""
    return ProductPlan(64 if is_gated else 128, 4, 4 if rows == ROWS[0] else 3)


@triton.jit(do_not_specialize=["x_row", "num_inputs", "num_outputs", "divisor"])
def expert_product(
    x,
    weights,
    rows,
    tile_experts,
    output,
    x_row,
    num_inputs,
    num_outputs,
    divisor,
    ROWS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    UNIT: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """One tile of rows and outputs. `x_row`, sizes: in units of `UNIT` numbers. `divisor`: assignments of a row of `x`;
    0: `x` is in the order of the rows."""
    tile = tl.program_id(1).to(tl.int64)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    size, width = num_inputs * UNIT, num_outputs * UNIT
    places = tile * ROWS + tl.arange(0, ROWS)
    assignments = tl.load(rows + places, mask=expert >= 0, other=-1)
    is_row = assignments >= 0
    sources = tl.where(divisor > 0, (assignments // tl.maximum(divisor, 1)).to(tl.int64), places)
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = columns < width
    inputs = tl.arange(0, BLOCK_INPUTS)
    weight_row = width * 2 if IS_GATED else width
    x_places = x + sources[:, None] * x_row * UNIT + inputs[None, :]
    of_expert = weights + tl.maximum(expert, 0) * size * weight_row
    weight_places = of_expert + inputs.to(tl.int64)[:, None] * weight_row + columns[None, :]

    total = tl.zeros((ROWS, BLOCK_OUTPUTS), tl.float32)
    of_ups = tl.zeros((ROWS, BLOCK_OUTPUTS), tl.float32)
    for first in range(0, tl.where(expert >= 0, size, 0), BLOCK_INPUTS):
        inside = first + inputs < size
        numbers = tl.load(x_places + first, mask=is_row[:, None] & inside[None, :], other=0.0)
        is_weight = inside[:, None] & is_output[None, :]
        own = tl.load(weight_places, mask=is_weight, other=0.0)
        total = tl.dot(numbers, own, total, input_precision="ieee")
        if IS_GATED:
            ups = tl.load(weight_places + width, mask=is_weight, other=0.0)
            of_ups = tl.dot(numbers, ups, of_ups, input_precision="ieee")
        weight_places += BLOCK_INPUTS * weight_row.to(tl.int64)
    if IS_GATED:
        total = total / (1.0 + tl.exp(-total)) * of_ups
    targets = output + places[:, None] * width + columns[None, :]
    tl.store(targets, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def expert_linear(x: Tensor, weights: Tensor, placement: Placement, *, is_gated: bool = False) -> Tensor:
    """Return the products in the order of `placement`: `[tiles * R, N]`; rows of padding are not written.

    Args:
        x: bfloat16, float16 or float32, dense rows: `[T, K]`, of which each row has `placement.top_k` assignments, or
            `[tiles * R, K]`, in the order of the placement. K, N and the distance of rows are multiples of 8.
        weights: `[E, K, N]`, contiguous, in the type of x; with `is_gated` `[E, K, 2 * N]`, gates, then ups.

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("x", x, (None, None), DTYPES)
    require_unit_stride("x", x)
    require_tensor("weights", weights, (None, x.shape[1], None), {x.dtype})
    require(weights.is_contiguous(), "weights", "is not contiguous")
    num_experts, num_inputs, width = weights.shape
    num_outputs = width // 2 if is_gated else width
    fits = num_outputs > 0 and num_inputs > 0 and not num_inputs % UNIT and not num_outputs % UNIT
    even = not is_gated or width % 2 == 0
    require(fits and even and num_experts > 0, "weights", f"has the shape {list(weights.shape)}; multiples of {UNIT}")
    require(x.stride(0) % UNIT == 0, "x", f"has rows {x.stride(0)} apart; give a multiple of {UNIT}")
    count, num_rows = placement.places.shape[0], placement.rows.shape[0]
    gathers = x.shape[0] * placement.top_k == count and x.shape[0] != num_rows
    require(gathers or x.shape[0] == num_rows, "x", f"has {x.shape[0]} rows for {count} assignments, {num_rows} placed")
    output = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not count:
        return output
    own = plan(placement.tile_rows, is_gated)
    tiles = placement.tile_experts.shape[0]
    expert_product[(triton.cdiv(num_outputs, own.block_outputs), tiles)](
        x,
        weights,
        placement.rows,
        placement.tile_experts,
        output,
        x.stride(0) // UNIT,
        num_inputs // UNIT,
        num_outputs // UNIT,
        placement.top_k if gathers else 0,
        **_constants(own, placement.tile_rows, is_gated),
        num_warps=own.num_warps,
        num_stages=own.num_stages,
    )
    return output


def _constants(own: ProductPlan, rows: int, is_gated: bool) -> dict[str, int | bool]:
    return {
        "ROWS": rows,
        "BLOCK_INPUTS": BLOCK_INPUTS,
        "BLOCK_OUTPUTS": own.block_outputs,
        "UNIT": UNIT,
        "IS_GATED": is_gated,
    }


def expert_product_variants() -> Iterator[Variant]:
    """Models in bfloat16, few and many rows per expert."""
    for rows in ROWS:
        for is_gated in (True, False):
            own = plan(rows, is_gated)
            arguments = {"x": "*bf16", "weights": "*bf16", "rows": "*i32", "tile_experts": "*i32", "output": "*bf16"}
            yield Variant(
                f"bf16-rows{rows}{'-gated' if is_gated else ''}",
                expert_product,
                arguments | dict.fromkeys(expert_product.arg_names[5:9], "i32"),
                _constants(own, rows, is_gated),
                TensorCores.WGMMA if rows >= 64 else TensorCores.MMA,
                own.num_warps,
                own.num_stages,
            )
