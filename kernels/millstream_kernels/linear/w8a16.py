"""Activations of 16 bits times a weight of 8 bits: FP8 (e4m3) on GPUs that have no product of it, and INT8.

Mathematics, with G groups of inputs, or one:

    y[m, n] = sum over g of  scale[n, g] * sum over k of g of  x[m, k] * code[n, k]   + bias[n]

The inner sum is one of the matrix unit, in 16 bits: an int8 and an e4m3 are exact in bfloat16 and float16. The scale
comes after it, in float32, so the weight itself is never rounded. sm_80 cannot convert e4m3, and here no GPU has to:

    e4m3 code    s eeee mmm      << 8, << 7      float16  s 0eeee mmm0000000  = value / 256, subnormal ones too
    256          is part of the scale

    one program     128 outputs, 16 or 64 rows of x; tiles of 128 inputs of one split (M <= 64), or of all

Weights are the left operand and stay as a checkpoint has them, `[out, in]`. A row has one result, whatever M: the order
of its sums is that of the inputs within a split, then that of the splits, as in `w4a16`.

A code that is no number (e4m3 0x7f, 0xff) counts as 480; checkpoints with one are refused when they are read.

Bytes:  N * K * (1 + 4 / group size), once for every 16 or 64 rows; M * K of x per 128 outputs, from L2; the partial
        sums of `splits`.
FLOPs:  2 * M * N * K.   Memory-bound up to M of about 150.

Micikevicius et al. 2022 (arXiv 2209.05433) for e4m3; Dettmers et al. 2022 (arXiv 2208.07339) for int8.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import capability_of, require, require_tensor, require_unit_stride
from millstream_kernels.linear.launch import FLOATS, LinearPlan, launch, output_or_new, plan_product, require_bias
from millstream_kernels.linear.splits import TILE
from millstream_kernels.linear.tuned import tuned_tiles, tuned_variants
from millstream_kernels.tuning.table import ARCHITECTURES
from millstream_kernels.variant import Variant

CODES = {torch.int8, torch.uint8}  # uint8: the bits of float8_e4m3fn
UNIT = 16  # K and strides are passed in units of 16 numbers: of codes, 16 bytes


def plan(num_rows: int, num_outputs: int, num_inputs: int, capability: int) -> LinearPlan:
    """Return how `num_rows` rows are multiplied. `capability`: 80 for sm_80."""
    return plan_product("w8a16", num_rows, num_outputs, num_inputs, capability)


@triton.jit
def numbers_of(codes, DTYPE: tl.constexpr):
    """int8 as they are; the bits of e4m3 as 1 / 256 of their value."""
    if codes.dtype == tl.int8:
        return codes.to(DTYPE)
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit(
    do_not_specialize=[
        "x_row",
        "weight_row",
        "num_rows",
        "num_outputs",
        "num_inputs",
        "split_tiles",
        "group_tiles",
        "has_bias",
    ]
)
def w8a16_product(
    x,
    weight,
    scales,
    bias,
    output,
    x_row,
    weight_row,
    num_rows,
    num_outputs,
    num_inputs,
    split_tiles,
    group_tiles,
    has_bias,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One tile of outputs and rows. `x_row`, `weight_row`, `num_inputs`: in units of `UNIT` numbers.

    PARTIAL: one split, to `output` float32 `[splits, M, tiles * TILE]`; else all, to `output` `[M, N]`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    FACTOR: tl.constexpr = 1.0 if weight.dtype.element_ty == tl.int8 else 256.0
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    is_row, is_output = rows < num_rows, columns < num_outputs
    inputs = tl.arange(0, TILE)
    size = num_inputs * UNIT
    input_tiles = tl.cdiv(size, TILE)
    x_places = x + rows.to(tl.int64)[None, :] * x_row * UNIT + inputs[:, None]
    weight_places = weight + columns.to(tl.int64)[:, None] * weight_row * UNIT + inputs[None, :]

    begin, end = 0, input_tiles
    if PARTIAL:
        begin = split * split_tiles
        end = tl.minimum(begin + split_tiles, input_tiles)
    total = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
    of_split = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
    left = split_tiles
    for tile in range(begin, end):
        first = tile * TILE
        inside = first + inputs < size
        codes = tl.load(weight_places + first, mask=is_output[:, None] & inside[None, :], other=0)
        numbers = tl.load(x_places + first, mask=is_row[None, :] & inside[:, None], other=0.0)
        of_tile = tl.dot(numbers_of(codes, DTYPE), numbers, input_precision="ieee")
        group = (tile // group_tiles).to(tl.int64)
        scale = tl.load(scales + group * num_outputs + columns, mask=is_output, other=0.0) * FACTOR
        of_split += of_tile * scale[:, None]
        if not PARTIAL:
            left -= 1
            if left == 0:
                total += of_split
                of_split = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
                left = split_tiles

    if PARTIAL:
        width = tl.num_programs(1) * TILE
        first_row = (split * num_rows.to(tl.int64) + rows)[None, :] * width
        tl.store(output + first_row + columns[:, None], of_split, mask=is_row[None, :])
    else:
        added = tl.load(bias + columns, mask=is_output & (has_bias != 0), other=0.0).to(tl.float32)
        total = total + of_split + added[:, None]
        places = output + rows.to(tl.int64)[None, :] * num_outputs + columns[:, None]
        tl.store(places, total.to(DTYPE), mask=is_row[None, :] & is_output[:, None])


def w8a16_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    group_size: int | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Return `x @ (weight * scales).T + bias`, `[M, N]`.

    Args:
        x: `[M, K]` in bfloat16, float16 or float32; dense rows; K and the distance of rows are multiples of 16.
        weight: `[N, K]` int8, or uint8: the bits of float8_e4m3fn. Dense rows, a multiple of 16 apart.
        scales: `[groups, N]` float32, contiguous.
        bias: `[N]` in the type of x.
        group_size: inputs of a group, a multiple of 128; None: all. The last group may be shorter.
        output: `[M, N]`, contiguous, in the type of x; allocated by default.

    Raises:
        KernelArgumentError: naming the argument.
    """
    group_tiles = _check(x, weight, scales, group_size)
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    require_bias(bias, num_outputs, x.dtype)
    output = output_or_new(output, num_rows, num_outputs, {x.dtype}, x, x.dtype)
    if num_rows == 0:
        return output
    own = plan(num_rows, num_outputs, x.shape[1], capability_of(x))
    launch(
        w8a16_product,
        own,
        own.grid(num_rows, num_outputs),
        (x, weight, scales),
        bias,
        output,
        (
            x.stride(0) // UNIT,
            weight.stride(0) // UNIT,
            num_rows,
            num_outputs,
            x.shape[1] // UNIT,
            own.splits.tiles,
            group_tiles,
            int(bias is not None),
        ),
        _constants(own.block_rows, own.writes_partials),
    )
    return output


def _check(x: Tensor, weight: Tensor, scales: Tensor, group_size: int | None) -> int:
    """The tiles of inputs that a group has."""
    require_tensor("x", x, (None, None), FLOATS)
    size = x.shape[1]
    require(size > 0 and size % UNIT == 0, "x", f"has {size} inputs; give a multiple of {UNIT}")
    require_tensor("weight", weight, (None, size), CODES)
    require(weight.shape[0] > 0, "weight", "has no outputs")
    for name, tensor in (("x", x), ("weight", weight)):
        require_unit_stride(name, tensor)
        distance = tensor.stride(0)
        require(distance % UNIT == 0, name, f"has rows {distance} apart; give a multiple of {UNIT}")
    length = group_size or size
    is_whole = length % TILE == 0 or length >= size
    require(length > 0 and is_whole, "group_size", f"is {length}; a multiple of {TILE} is expected")
    require_tensor("scales", scales, (triton.cdiv(size, length), weight.shape[0]), {torch.float32})
    require(scales.is_contiguous(), "scales", "is not contiguous")
    return -(-length // TILE)


def _constants(block_rows: int, partial: bool) -> dict[str, int | bool]:
    return {"BLOCK_ROWS": block_rows, "TILE": TILE, "UNIT": UNIT, "PARTIAL": partial}


def w8a16_variants() -> Iterator[Variant]:
    """Models in bfloat16 with codes of either kind; a variant serves scales per channel and per group."""
    numbers = dict.fromkeys(w8a16_product.arg_names[5:13], "i32")
    for capability, (kind, codes) in product(ARCHITECTURES, (("int8", "i8"), ("e4m3", "u8"))):
        tiles = tuned_tiles("w8a16", capability)
        operands = {"x": "*bf16", "weight": f"*{codes}", "scales": "*fp32"}
        yield from tuned_variants(
            w8a16_product, tiles, capability, f"bf16-{kind}", "bf16", operands, numbers, constants_of=_constants
        )
