"""Up to 64 rows of 16 bits times a weight of 16 bits: decodes, and the rows of a draft's check.

Mathematics:

    y[m, n] = sum over k of  x[m, k] * weight[n, k]   + bias[n]

Why not cuBLAS: it chooses a kernel, and with it the order of the sums, by the number of rows. Then a row's result
depends on how many others are computed with it, and a draft that is checked as one of several rows may be refused for a
rounding. Here a row has one result at every M up to 64:

    inputs      | tile | tile | .. |      64 inputs each, one after another, of one split
    splits      ((0 + split 0) + split 1) + ..     where they end follows from the weight's shape (`splits`)
    one program     128 outputs, 16 or 64 rows of x, one split

The weight is the left operand, [outputs, inputs]: a tile of 128 outputs gives `wgmma` on sm_90 however few rows `x`
has. It stays as a checkpoint has it, `[out, in]`. Products of more than 64 rows are left to torch, whose results may
differ in the last bits. (One thing is taken for granted, as in `w4a16`: that a matrix unit sums 16 inputs alike for
tiles of 16 and of 64 rows.)

Bytes:  2 * N * K, once; M * K of x per 128 outputs, from L2; where a weight is split, the partial sums of `splits`.
FLOPs:  2 * M * N * K.   Memory-bound at every M that it takes.

Thakkar et al. 2023 (CUTLASS 3) for the swapped operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import capability_of, require, require_tensor, require_unit_stride
from millstream_kernels.linear.launch import FLOATS, LinearPlan, launch, output_or_new, plan_product, require_bias
from millstream_kernels.linear.splits import TILE
from millstream_kernels.linear.tuned import tuned_tiles, tuned_variants
from millstream_kernels.tuning.candidates import FEW_ROWS, SPLIT_ROWS
from millstream_kernels.tuning.table import ARCHITECTURES
from millstream_kernels.variant import Variant

UNIT = 8  # sizes and distances of rows are passed in units of 8 numbers
MAX_ROWS = SPLIT_ROWS
BLOCK_INPUTS = 64  # of the inner loop; part of the order of a row's sum, so no table names it


def plan(num_rows: int, num_outputs: int, num_inputs: int, capability: int) -> LinearPlan:
    """Return how `num_rows` rows, up to `MAX_ROWS`, are multiplied. `capability`: 80 for sm_80."""
    return plan_product("w16a16", num_rows, num_outputs, num_inputs, capability, whole_weight_rows=0)


def unsupported(weight: Tensor) -> str | None:
    """Why the kernel does not take a weight `[out, in]`; None: it does."""
    if weight.dtype not in FLOATS:
        return f"dtype {str(weight.dtype).removeprefix('torch.')}"
    if weight.stride(1) != 1:
        return "inputs of an output do not follow one another"
    if weight.shape[1] % UNIT or weight.stride(0) % UNIT:
        return f"rows of {weight.shape[1]} inputs, {weight.stride(0)} apart: multiples of {UNIT} are supported"
    return "no outputs or no inputs" if 0 in weight.shape else None


@triton.jit(
    do_not_specialize=["x_row", "weight_row", "num_rows", "num_outputs", "num_inputs", "split_tiles", "has_bias"]
)
def w16a16_product(
    x,
    weight,
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
    BLOCK_INPUTS: tl.constexpr,
    UNIT: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One tile of outputs, all rows, one split. `x_row`, `weight_row`, `num_inputs`: in units of `UNIT` numbers.

    PARTIAL: to `output` float32 `[splits, M, tiles * TILE]`; else the only split, to `output` `[M, N]`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    split = tl.program_id(1)
    is_row, is_output = rows < num_rows, columns < num_outputs
    inputs = tl.arange(0, BLOCK_INPUTS)
    size = num_inputs * UNIT
    x_places = x + rows.to(tl.int64)[None, :] * x_row * UNIT + inputs[:, None]
    weight_places = weight + columns.to(tl.int64)[:, None] * weight_row * UNIT + inputs[None, :]

    begin = split * split_tiles * TILE
    end = tl.minimum(begin + split_tiles * TILE, size)
    total = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
    for first in range(begin, end, BLOCK_INPUTS):
        inside = first + inputs < size
        weights = tl.load(weight_places + first, mask=is_output[:, None] & inside[None, :], other=0.0)
        numbers = tl.load(x_places + first, mask=is_row[None, :] & inside[:, None], other=0.0)
        total = tl.dot(weights, numbers, total, input_precision="ieee")

    if PARTIAL:
        width = tl.num_programs(0) * TILE
        first_row = (split * num_rows.to(tl.int64) + rows)[None, :] * width
        tl.store(output + first_row + columns[:, None], total, mask=is_row[None, :])
    else:
        added = tl.load(bias + columns, mask=is_output & (has_bias != 0), other=0.0).to(tl.float32)
        places = output + rows.to(tl.int64)[None, :] * num_outputs + columns[:, None]
        tl.store(places, (total + added[:, None]).to(DTYPE), mask=is_row[None, :] & is_output[:, None])


def w16a16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, output: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, `[M, N]`.

    Args:
        x: `[M, K]` in bfloat16, float16 or float32, M at most 64; dense rows; K and the distance of rows are multiples
            of 8.
        weight: `[N, K]` in the type of x; dense rows, a multiple of 8 apart.
        bias: `[N]` in the type of x.
        output: `[M, N]`, contiguous, in the type of x; allocated by default.

    Raises:
        KernelArgumentError: naming the argument.
        TuningTableError: the table of this GPU's architecture cannot be used.
    """
    _check(x, weight)
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    require_bias(bias, num_outputs, x.dtype)
    output = output_or_new(output, num_rows, num_outputs, {x.dtype}, x, x.dtype)
    if num_rows == 0:
        return output
    own = plan(num_rows, num_outputs, x.shape[1], capability_of(x))
    launch(
        w16a16_product,
        own,
        own.grid(num_rows, num_outputs)[1:],  # one tile has all rows
        (x, weight),
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
        _constants(own.block_rows, own.writes_partials),
    )
    return output


def _check(x: Tensor, weight: Tensor) -> None:
    require_tensor("x", x, (None, None), FLOATS)
    num_rows, size = x.shape
    require(num_rows <= MAX_ROWS, "x", f"has {num_rows} rows; at most {MAX_ROWS} are supported")
    require(size > 0 and size % UNIT == 0, "x", f"has {size} inputs; give a multiple of {UNIT}")
    require_tensor("weight", weight, (None, size), {x.dtype})
    require(weight.shape[0] > 0, "weight", "has no outputs")
    require(weight.device == x.device, "weight", f"is on {weight.device}, x on {x.device}")
    for name, tensor in (("x", x), ("weight", weight)):
        require_unit_stride(name, tensor)
        distance = tensor.stride(0)
        require(
            distance % UNIT == 0 or tensor.shape[0] == 1, name, f"has rows {distance} apart; give a multiple of {UNIT}"
        )


def _constants(block_rows: int, partial: bool) -> dict[str, int | bool]:
    return {"BLOCK_ROWS": block_rows, "TILE": TILE, "BLOCK_INPUTS": BLOCK_INPUTS, "UNIT": UNIT, "PARTIAL": partial}


def w16a16_variants() -> Iterator[Variant]:
    """Weights that are split and that are not, in both types; a variant serves every size."""
    wanted = tuple(product((FEW_ROWS, SPLIT_ROWS), (True, False)))
    numbers = dict.fromkeys(w16a16_product.arg_names[4:11], "i32")
    for capability, dtype in product(ARCHITECTURES, ("bf16", "fp16")):
        tiles = tuned_tiles("w16a16", capability, wanted)
        operands = {"x": f"*{dtype}", "weight": f"*{dtype}"}
        yield from tuned_variants(
            w16a16_product, tiles, capability, dtype, dtype, operands, numbers, constants_of=_constants
        )
