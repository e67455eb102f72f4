"""Activations of 8 bits times a weight of 8 bits: INT8 and FP8 (e4m3), with scales per channel and token or per block.

Mathematics:

    channel x token   y[m, n] = a[m] * w[n] * sum over k of  x[m, k] * weight[n, k]   + bias[n]
    block             y[m, n] = sum over tiles t of 128 inputs of  a[m, t] * w[n / 128, t] * (its sum)   + bias[n]

A scale of a whole tensor is a channel's that all outputs share: the weight's scales are widened once, at load.

    one program    [128 outputs, 128 inputs] x [128 inputs, 16, 64 or 128 rows]
    inputs         | tile | tile | .. |      of one split (M <= 64), or of all
                      sum    sum             INT8: int32, exact.  FP8: float32, promoted after each tile

FP8's trap: on sm_90 the matrix unit adds float8 products to a running sum of about 14 bits. A sum that runs over all
inputs loses what a bfloat16 result would keep. Here it never runs further than a tile of 128: `max_num_imprecise_acc`.

A row has one result at every M up to 64, as in `w4a16`: splits follow from the weight's shape. Beyond, one program sums
all inputs, which may differ in the last bits: a second sum in registers would spill. Float8 has matrix instructions
from sm_89 on; the table of variants has FP8 for sm_90 alone.

Bytes:  N * K, once for every 16, 64 or 128 rows; M * K of x per 128 outputs, from L2; the partial sums of `splits`.
FLOPs:  2 * M * N * K, at twice the rate of 16 bits.   Memory-bound up to M of about 200.

Dettmers et al. 2022 (arXiv 2208.07339); Micikevicius et al. 2022 (arXiv 2209.05433); DeepSeek-AI 2024 (arXiv
2412.19437, 3.3.2) for blocks of 128 and the trap.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError, capability_of, require, require_tensor
from millstream_kernels.linear.launch import FLOATS, LinearPlan, launch, output_or_new, plan_product
from millstream_kernels.linear.splits import TILE
from millstream_kernels.linear.tuned import tuned_tiles, tuned_variants
from millstream_kernels.tuning.candidates import FEW_ROWS, SPLIT_ROWS
from millstream_kernels.variant import Variant

CODES = {torch.int8, torch.float8_e4m3fn}
UNIT = 16  # sizes and strides of codes are passed in units of 16 bytes
FP8_CAPABILITY = 89


class ScaleKind(StrEnum):
    """What a scale belongs to."""

    CHANNEL = "channel"  # weight_scales [N], x_scales [M]
    BLOCK = "block"  # weight_scales [N / 128, K / 128], x_scales [M, K / 128], both rounded up


def plan(num_rows: int, num_outputs: int, num_inputs: int, capability: int) -> LinearPlan:
    """Return how `num_rows` rows are multiplied. `capability`: 80 for sm_80."""
    return plan_product("w8a8", num_rows, num_outputs, num_inputs, capability, whole_weight_rows=SPLIT_ROWS)


@triton.jit(
    do_not_specialize=["x_row", "weight_row", "num_rows", "num_outputs", "num_inputs", "split_tiles", "has_bias"]
)
def w8a8_product(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    output,
    x_row,
    weight_row,
    num_rows,
    num_outputs,
    num_inputs,
    split_tiles,
    has_bias,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    IS_BLOCK: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One tile of outputs and rows. `x_row`, `weight_row`, `num_inputs`: in units of `UNIT` numbers.

    PARTIAL: one split, to `output` float32 `[splits, M, tiles * TILE]`; else all, to `output` `[M, N]`.
    """
    SUMS: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    is_row, is_output = rows < num_rows, columns < num_outputs
    inputs = tl.arange(0, TILE)
    size = num_inputs * UNIT
    input_tiles = tl.cdiv(size, TILE)
    x_places = x + rows.to(tl.int64)[None, :] * x_row * UNIT + inputs[:, None]
    weight_places = weight + columns.to(tl.int64)[:, None] * weight_row * UNIT + inputs[None, :]
    x_scale_places, weight_scale_places = x_scales + rows, weight_scales + columns
    if IS_BLOCK:
        x_scale_places = x_scales + rows.to(tl.int64) * input_tiles
        weight_scale_places = weight_scales + tl.program_id(1).to(tl.int64) * input_tiles
    else:
        x_scale = tl.load(x_scale_places, mask=is_row, other=0.0)
        weight_scale = tl.load(weight_scale_places, mask=is_output, other=0.0)
        scale = x_scale[None, :] * weight_scale[:, None]

    begin, end = 0, input_tiles
    if PARTIAL:
        begin = split * split_tiles
        end = tl.minimum(begin + split_tiles, input_tiles)
    of_split = tl.zeros((TILE, BLOCK_ROWS), tl.float32 if IS_BLOCK else SUMS)
    for tile in range(begin, end):
        first = tile * TILE
        inside = first + inputs < size
        w = tl.load(weight_places + first, mask=is_output[:, None] & inside[None, :], other=0.0)
        numbers = tl.load(x_places + first, mask=is_row[None, :] & inside[:, None], other=0.0)
        if IS_BLOCK:
            of_tile = tl.dot(w, numbers, out_dtype=SUMS).to(tl.float32)
            x_scale = tl.load(x_scale_places + tile, mask=is_row, other=0.0)
            of_split += of_tile * (x_scale * tl.load(weight_scale_places + tile))[None, :]
        else:
            of_split = tl.dot(w, numbers, of_split, max_num_imprecise_acc=TILE, out_dtype=SUMS)

    total = of_split if IS_BLOCK else of_split.to(tl.float32) * scale
    if PARTIAL:
        width = tl.num_programs(1) * TILE
        first_row = (split * num_rows.to(tl.int64) + rows)[None, :] * width
        tl.store(output + first_row + columns[:, None], total, mask=is_row[None, :])
    else:
        added = tl.load(bias + columns, mask=is_output & (has_bias != 0), other=0.0).to(tl.float32)
        total += added[:, None]
        places = output + rows.to(tl.int64)[None, :] * num_outputs + columns[:, None]
        tl.store(places, total.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def w8a8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    output: Tensor | None = None,
) -> Tensor:
    """Return `(x * x_scales) @ (weight * weight_scales).T + bias`, `[M, N]`.

    Args:
        x: `[M, K]`, int8 or float8_e4m3fn (`elementwise.codes.Quantized.codes`, float8 as `view(torch.float8_e4m3fn)`);
            dense rows; K and the distance of rows are multiples of 16.
        x_scales: float32, contiguous: `[M]`, or `[M, K / 128]` with blocks.
        weight: `[N, K]` in the type of x, as in a checkpoint; dense rows, a multiple of 16 apart.
        weight_scales: float32, contiguous: `[N]`, or `[N / 128, K / 128]` rounded up, which means blocks.
        bias: `[N]` in the output's type.
        dtype: of the output that is allocated: bfloat16, float16 or float32.
        output: `[M, N]`, contiguous.

    Raises:
        KernelArgumentError: naming the argument.
    """
    kind = _check(x, x_scales, weight, weight_scales)
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    output = output_or_new(output, num_rows, num_outputs, FLOATS, x, dtype)
    if bias is not None:
        require_tensor("bias", bias, (num_outputs,), {output.dtype})
        require(bias.is_contiguous(), "bias", "is not contiguous")
    if num_rows == 0:
        return output
    own = plan(num_rows, num_outputs, x.shape[1], capability_of(x))
    launch(
        w8a8_product,
        own,
        own.grid(num_rows, num_outputs),
        (x, x_scales, weight, weight_scales),
        bias,
        output,
        (
            x.stride(0) // UNIT,
            weight.stride(0) // UNIT,
            num_rows,
            num_outputs,
            x.shape[1] // UNIT,
            own.splits.tiles,
            int(bias is not None),
        ),
        _constants(kind, own.block_rows, own.writes_partials),
    )
    return output


def _check(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> ScaleKind:
    require_tensor("x", x, (None, None), CODES)
    num_rows, size = x.shape
    require(size > 0 and size % UNIT == 0, "x", f"has {size} inputs; give a multiple of {UNIT}")
    require_tensor("weight", weight, (None, size), {x.dtype})
    num_outputs = weight.shape[0]
    require(num_outputs > 0, "weight", "has no outputs")
    for name, codes in (("x", x), ("weight", weight)):
        require(codes.stride(1) == 1, name, f"has a stride of {codes.stride(1)} in its last dimension; 1 is expected")
        require(codes.stride(0) % UNIT == 0, name, f"has rows {codes.stride(0)} apart; give a multiple of {UNIT}")
    if x.dtype == torch.float8_e4m3fn and capability_of(x) < FP8_CAPABILITY:
        raise KernelArgumentError("x", f"is float8_e4m3fn; sm_{capability_of(x)} has no matrix instruction for it")
    kind = ScaleKind.BLOCK if weight_scales.dim() == 2 else ScaleKind.CHANNEL
    per_row: tuple[int, ...] = (num_rows,)
    per_output: tuple[int, ...] = (num_outputs,)
    if kind == ScaleKind.BLOCK:
        input_tiles = triton.cdiv(size, TILE)
        per_row, per_output = (num_rows, input_tiles), (triton.cdiv(num_outputs, TILE), input_tiles)
    for name, scales, shape in (("x_scales", x_scales, per_row), ("weight_scales", weight_scales, per_output)):
        require_tensor(name, scales, shape, {torch.float32})
        require(scales.is_contiguous(), name, "is not contiguous")
    return kind


def _constants(kind: ScaleKind, block_rows: int, writes_partials: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_ROWS": block_rows,
        "TILE": TILE,
        "UNIT": UNIT,
        "IS_BLOCK": kind == ScaleKind.BLOCK,
        "PARTIAL": writes_partials,
    }


def w8a8_variants() -> Iterator[Variant]:
    """Models in bfloat16: INT8 by channel, FP8 by channel and by block."""
    formats = [("i8", ScaleKind.CHANNEL, 80), ("i8", ScaleKind.CHANNEL, 90)]
    formats += [("fp8e4nv", ScaleKind.CHANNEL, 90), ("fp8e4nv", ScaleKind.BLOCK, 90)]
    wanted = ((FEW_ROWS, True), (SPLIT_ROWS, True), (None, False))
    numbers = dict.fromkeys(w8a8_product.arg_names[6:13], "i32")
    for codes, kind, capability in formats:
        tiles = tuned_tiles("w8a8", capability, wanted)
        operands = {"x": f"*{codes}", "x_scales": "*fp32", "weight": f"*{codes}", "weight_scales": "*fp32"}
        constants_of, name = partial(_constants, kind), f"{codes}-{kind}"
        yield from tuned_variants(w8a8_product, tiles, capability, name, "bf16", operands, numbers, constants_of)
