"""Activations of 16 bits times a weight of 4 bits with a scale and a zero point per group: AWQ, GPTQ.

Mathematics, with G groups of inputs:

    y[m, n] = sum over g of  scale[n, g] * sum over k of g of  x[m, k] * (code[n, k] - zero[n, g])   + bias[n]

The inner sum is one of the matrix unit. code - zero is a whole number of -15 to 15, exact in bfloat16 and float16; the
scale comes after it, in float32. So the weight itself is never rounded, as it is where it is dequantized to 16 bits.

    word of two codes   >> 1, & 0x0078 0078     code in the upper bits of a mantissa
                        | 0x4180 4180           bfloat16: 16 + code, both halves at once
                        - (16 + zero)           exact

Weights are the left operand, [outputs, inputs]: a tile of 128 outputs gives `wgmma` on sm_90 however few rows `x` has,
and the weights go from shared memory to registers to the matrix unit, never back.

    one program     128 outputs, 16, 64 or 128 rows of x; tiles of 128 inputs of one split (M <= 64), or of all
    M <= 64         partial sums per split, added in the order of splits by `splits.sum_splits`

A row has one result, whatever M: the order of its sums is that of the inputs within a split, then that of the splits,
and splits follow from the weight's shape. In particular decodes alone, in company and as rows of a draft's check have
the same bits, and those of a prompt too. (A matrix unit that sums 16 inputs in another order for a wider tile of rows
would break that: NVIDIA documents no order, none is known to do so.)

Bytes:  N * K / 2 * (1 + 8 / group size), once for every 16, 64 or 128 rows; M * K of x per 128 outputs, from L2; the
        partial sums of `splits`.
FLOPs:  2 * M * N * K.   Memory-bound up to M of about 100; unpacking costs 2 to 3 instructions per weight.

Lin et al. 2023 (AWQ, arXiv 2306.00978); Frantar et al. 2022 (GPTQ, arXiv 2210.17323) and 2024 (Marlin, arXiv
2408.11743).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import capability_of, require, require_tensor, require_unit_stride
from millstream_kernels.linear.int4_weight import RUN, RUNS, TILE, UNIT, Int4Weight
from millstream_kernels.linear.launch import FLOATS, LinearPlan, launch, output_or_new, plan_product, require_bias
from millstream_kernels.linear.tuned import tuned_tiles, tuned_variants
from millstream_kernels.tuning.table import ARCHITECTURES
from millstream_kernels.variant import Variant


def table_name(group_size: int) -> str:
    """The kernel in the tuning tables: small groups need more registers for their scales, so fewer rows fit."""
    return "w4a16" if group_size >= TILE else "w4a16-small-groups"


def plan(num_rows: int, weight: Int4Weight, capability: int) -> LinearPlan:
    """Return how `num_rows` rows are multiplied. `capability`: 80 for sm_80."""
    name = table_name(weight.group_size)
    return plan_product(name, num_rows, weight.num_outputs, weight.num_inputs, capability)


@triton.jit
def codes_of_run(words, RUN_NUMBER: tl.constexpr, DTYPE: tl.constexpr):
    """`16 + code` of one run of inputs, `[outputs, 32]`, from `[outputs, 16]` words."""
    if tl.float32 == DTYPE:
        high = 16.0 + ((words >> (16 + 4 * RUN_NUMBER)) & 0xF).to(tl.float32)
        low = 16.0 + ((words >> (4 * RUN_NUMBER)) & 0xF).to(tl.float32)
        return tl.join(high, low).reshape(words.shape[0], 2 * words.shape[1])
    # 16 has an exponent of its own, and the code's 4 bits are the upper ones of the mantissa: 3 or 6 bits from below.
    PLACE: tl.constexpr = 3 if tl.bfloat16 == DTYPE else 6
    SIXTEEN: tl.constexpr = 0x41804180 if tl.bfloat16 == DTYPE else 0x4C004C00
    SHIFT: tl.constexpr = 4 * RUN_NUMBER - PLACE
    shifted = words >> SHIFT if SHIFT >= 0 else words << -SHIFT
    # The mask comes after the shift: it drops the bits of the other half, and those of an arithmetic shift's sign.
    both = (shifted & (0x000F000F << PLACE)) | SIXTEEN
    neighbours = tl.join((both >> 16).to(tl.int16), both.to(tl.int16))
    return neighbours.reshape(words.shape[0], 2 * words.shape[1]).to(DTYPE, bitcast=True)


@triton.jit
def scale_and_zero(words, DTYPE: tl.constexpr, SCALE_IS_BF16: tl.constexpr):
    """Scales in float32, and `16 + zero` in the type of codes."""
    if SCALE_IS_BF16:
        scale = (words << 16).to(tl.float32, bitcast=True)
    else:
        scale = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, ((words >> 16) + 16).to(tl.float32).to(DTYPE)


@triton.jit(
    do_not_specialize=[
        "x_row",
        "num_rows",
        "num_outputs",
        "num_inputs",
        "input_tiles",
        "split_tiles",
        "group_tiles",
        "num_groups",
        "has_bias",
    ]
)
def w4a16_product(
    x,
    codes,
    groups,
    bias,
    output,
    x_row,
    num_rows,
    num_outputs,
    num_inputs,
    input_tiles,
    split_tiles,
    group_tiles,
    num_groups,
    has_bias,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE_IS_BF16: tl.constexpr,
    PARTIAL: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
):
    """One tile of outputs and rows. `x_row`, `num_inputs`: in units of `UNIT` numbers; `GROUP_RUNS`: of a group.

    PARTIAL: one split, to `output` float32 `[splits, M, tiles * TILE]`; else all, to `output` `[M, N]`.
    """
    RUNS: tl.constexpr = TILE // RUN
    WORDS: tl.constexpr = RUN // 2
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output_tile = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    is_row = rows < num_rows
    outputs = tl.arange(0, TILE)
    inputs = tl.arange(0, RUN)
    x_places = x + rows.to(tl.int64)[None, :] * x_row * UNIT + inputs[:, None]
    words_of_output = outputs[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    codes_places = codes + output_tile * input_tiles * (TILE * WORDS) + words_of_output
    groups_places = groups + output_tile * num_groups * TILE + outputs

    begin, end = 0, input_tiles
    if PARTIAL:
        begin = split * split_tiles
        end = tl.minimum(begin + split_tiles, input_tiles)
    total = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
    of_split = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
    left = split_tiles
    for tile in range(begin, end):
        words = tl.load(codes_places + tile * (TILE * WORDS))
        of_group = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
        for run in tl.static_range(RUNS):
            if run % GROUP_RUNS == 0:
                group = tile // group_tiles if GROUP_RUNS == RUNS else tile * (RUNS // GROUP_RUNS) + run // GROUP_RUNS
                scale, zero = scale_and_zero(tl.load(groups_places + group * TILE), DTYPE, SCALE_IS_BF16)
                of_group = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
            first = tile * TILE + run * RUN
            inside = is_row[None, :]
            if not WHOLE_TILES:
                inside &= (first + inputs < num_inputs * UNIT)[:, None]
            numbers = tl.load(x_places + first, mask=inside, other=0.0)
            weights = codes_of_run(words, run, DTYPE) - zero[:, None]
            of_group = tl.dot(weights, numbers, of_group, input_precision="ieee")
            if run % GROUP_RUNS == GROUP_RUNS - 1:
                of_split += of_group * scale[:, None]
        if not PARTIAL:
            left -= 1
            if left == 0:
                total += of_split
                of_split = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
                left = split_tiles

    columns = output_tile * TILE + outputs
    if PARTIAL:
        width = tl.num_programs(1) * TILE
        first_row = (split * num_rows.to(tl.int64) + rows)[None, :] * width
        tl.store(output + first_row + columns[:, None], of_split, mask=is_row[None, :])
    else:
        is_output = columns < num_outputs
        added = tl.load(bias + columns, mask=is_output & (has_bias != 0), other=0.0).to(tl.float32)
        total = total + of_split + added[:, None]
        places = output + rows.to(tl.int64)[None, :] * num_outputs + columns[:, None]
        tl.store(places, total.to(DTYPE), mask=is_row[None, :] & is_output[:, None])


def w4a16_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, output: Tensor | None = None) -> Tensor:
    """Return `x @ weight + bias`, `[M, N]`.

    Args:
        x: `[M, K]` in bfloat16, float16 or float32; dense rows, K and their distance are multiples of 8 numbers. Where
            the weight has an order of inputs, x is copied in that order first.
        bias: `[N]` in the type of x.
        output: `[M, N]`, contiguous, in the type of x; allocated by default.

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("x", x, (None, weight.num_inputs), FLOATS)
    num_rows, num_inputs = x.shape
    require(num_inputs % UNIT == 0, "x", f"has {num_inputs} inputs; give a multiple of {UNIT}")
    require(weight.codes.device == x.device, "weight", f"is on {weight.codes.device}, x on {x.device}")
    require_bias(bias, weight.num_outputs, x.dtype)
    output = output_or_new(output, num_rows, weight.num_outputs, {x.dtype}, x, x.dtype)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    require_unit_stride("x", x)
    require(x.stride(0) % UNIT == 0, "x", f"has rows {x.stride(0)} apart; give a multiple of {UNIT}")
    if num_rows == 0:
        return output
    own = plan(num_rows, weight, capability_of(x))
    launch(
        w4a16_product,
        own,
        own.grid(num_rows, weight.num_outputs),
        (x, weight.codes, weight.groups),
        bias,
        output,
        (
            x.stride(0) // UNIT,
            num_rows,
            weight.num_outputs,
            num_inputs // UNIT,
            weight.codes.shape[1],
            own.splits.tiles,
            max(1, weight.group_size // TILE),
            weight.groups.shape[1],
            int(bias is not None),
        ),
        _constants(weight.group_size, weight.scale_dtype, num_inputs % TILE == 0, own.block_rows, own.writes_partials),
    )
    return output


def _constants(
    group_size: int, scales: torch.dtype, whole_tiles: bool, block_rows: int, writes_partials: bool
) -> dict[str, int | bool]:
    return {
        "BLOCK_ROWS": block_rows,
        "TILE": TILE,
        "RUN": RUN,
        "GROUP_RUNS": min(RUNS, group_size // RUN),
        "UNIT": UNIT,
        "SCALE_IS_BF16": scales == torch.bfloat16,
        "PARTIAL": writes_partials,
        "WHOLE_TILES": whole_tiles,
    }


def w4a16_variants() -> Iterator[Variant]:
    """Models in bfloat16 with scales in float16, as AWQ and GPTQ write them, and inputs in whole tiles."""
    formats = [("bf16", 128), ("bf16", 64), ("bf16", 32), ("fp16", 128)]
    numbers = dict.fromkeys(w4a16_product.arg_names[5:14], "i32")
    for capability, (dtype, group_size) in product(ARCHITECTURES, formats):
        tiles, name = tuned_tiles(table_name(group_size), capability), f"{dtype}-group{group_size}"
        operands = {"x": f"*{dtype}", "codes": "*i32", "groups": "*i32"}
        constants_of = partial(_constants, group_size, torch.float16, True)
        yield from tuned_variants(w4a16_product, tiles, capability, name, dtype, operands, numbers, constants_of)
