"""Activations of 16 bits times a weight in NF4, in the memory that bitsandbytes writes, its scales quantized or not.

Mathematics, with groups of 64 inputs:

    y[m, n] = sum over g of  scale[n, g] * sum over k of g of  x[m, k] * value[code[n, k]]   + bias[n]
    scale   = absmax[n, g]                                                    float32
            = table[absmax[n, g]] * nested_absmax[(n * G + g) / 256] + offset       double quantization, 8 bits

    byte of a row    | code 2i | code 2i + 1 |      the first of two inputs above
                       value     value              16 numbers, looked up in L1, rounded to the type of x

The inner sum is one of the matrix unit, in 16 bits, the scale comes after it in float32: a value is rounded to 16 bits,
as a dequantized weight would be, but never a product of both.

    one program     128 outputs, 16 or 64 rows of x; groups of 64 inputs of one split (M <= 64), or of all

A row has one result, whatever M: the order of its sums is that of the inputs within a split, then that of the splits,
as in `w4a16`. Nothing is repacked.

Bytes:  N * K * (1 / 2 + 1 / 64), or 1 / 16 with scales in float32, once for every 16 or 64 rows; M * K of x per 128
        outputs, from L2; the partial sums of `splits`.
FLOPs:  2 * M * N * K.   One look-up per weight may bound it before memory does.

Dettmers et al. 2023 (QLoRA, arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
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

GROUP, NESTED_GROUP = 64, 256  # inputs of a scale; scales of a nested one
UNIT = 8  # the distance of rows of x is passed in units of 8 numbers


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Double quantization, as bitsandbytes writes it; all float32."""

    table: Tensor  # [256]
    absmax: Tensor  # [N * K / 64 / 256, rounded up]
    offset: float


@dataclass(frozen=True, slots=True)
class Nf4Weight:
    """A weight `[N, K]`; K is a multiple of 64."""

    codes: Tensor  # uint8 [N, K / 2], contiguous
    absmax: Tensor  # [N, K / 64], contiguous: float32, or uint8 with `nested`
    values: Tensor  # float32 [16]
    nested: NestedScales | None = None

    @property
    def num_bytes(self) -> int:
        tensors = [self.codes, self.absmax, self.values]
        tensors += [] if self.nested is None else [self.nested.table, self.nested.absmax]
        return sum(one.numel() * one.element_size() for one in tensors)


def plan(num_rows: int, num_outputs: int, num_inputs: int, capability: int) -> LinearPlan:
    """Return how `num_rows` rows are multiplied. `capability`: 80 for sm_80."""
    return plan_product("nf4", num_rows, num_outputs, num_inputs, capability)


@triton.jit(do_not_specialize=["x_row", "num_rows", "num_outputs", "num_groups", "split_groups", "has_bias"])
def nf4_product(
    x,
    codes,
    absmax,
    values,
    nested_table,
    nested_absmax,
    bias,
    output,
    x_row,
    num_rows,
    num_outputs,
    num_groups,
    split_groups,
    has_bias,
    offset,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    NESTED_GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    IS_NESTED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One tile of outputs and rows. `x_row`: in units of `UNIT` numbers; `num_groups`, `split_groups`: of inputs.

    PARTIAL: one split, to `output` float32 `[splits, M, tiles * TILE]`; else all, to `output` `[M, N]`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    BYTES: tl.constexpr = GROUP // 2
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    is_row, is_output = rows < num_rows, columns < num_outputs
    inputs, pairs = tl.arange(0, GROUP), tl.arange(0, BYTES)
    x_places = x + rows.to(tl.int64)[None, :] * x_row * UNIT + inputs[:, None]
    first_group = columns.to(tl.int64) * num_groups
    codes_places = codes + (first_group * BYTES)[:, None] + pairs[None, :]

    begin, end = 0, num_groups
    if PARTIAL:
        begin = split * split_groups
        end = tl.minimum(begin + split_groups, num_groups)
    total = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
    of_split = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
    left = split_groups
    for group in range(begin, end):
        both = tl.load(codes_places + group * BYTES, mask=is_output[:, None], other=0).to(tl.int32)
        high, low = tl.load(values + (both >> 4)).to(DTYPE), tl.load(values + (both & 15)).to(DTYPE)
        weights = tl.join(high, low).reshape(TILE, GROUP)
        numbers = tl.load(x_places + group * GROUP, mask=is_row[None, :], other=0.0)
        of_group = tl.dot(weights, numbers, input_precision="ieee")
        scale = tl.load(absmax + first_group + group, mask=is_output, other=0)
        if IS_NESTED:
            nested = tl.load(nested_absmax + (first_group + group) // NESTED_GROUP, mask=is_output, other=0.0)
            scale = tl.load(nested_table + scale.to(tl.int32)) * nested + offset
        of_split += of_group * scale[:, None]
        if not PARTIAL:
            left -= 1
            if left == 0:
                total += of_split
                of_split = tl.zeros((TILE, BLOCK_ROWS), tl.float32)
                left = split_groups

    if PARTIAL:
        width = tl.num_programs(1) * TILE
        first_row = (split * num_rows.to(tl.int64) + rows)[None, :] * width
        tl.store(output + first_row + columns[:, None], of_split, mask=is_row[None, :])
    else:
        added = tl.load(bias + columns, mask=is_output & (has_bias != 0), other=0.0).to(tl.float32)
        total = total + of_split + added[:, None]
        places = output + rows.to(tl.int64)[None, :] * num_outputs + columns[:, None]
        tl.store(places, total.to(DTYPE), mask=is_row[None, :] & is_output[:, None])


def nf4_linear(x: Tensor, weight: Nf4Weight, bias: Tensor | None = None, *, output: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, `[M, N]`.

    Args:
        x: `[M, K]` in bfloat16, float16 or float32; dense rows, a multiple of 8 apart.
        bias: `[N]` in the type of x.
        output: `[M, N]`, contiguous, in the type of x; allocated by default.

    Raises:
        KernelArgumentError: naming the argument.
    """
    num_outputs, num_groups = _check(x, weight)
    num_rows = x.shape[0]
    require_bias(bias, num_outputs, x.dtype)
    output = output_or_new(output, num_rows, num_outputs, {x.dtype}, x, x.dtype)
    if num_rows == 0:
        return output
    own, nested = plan(num_rows, num_outputs, x.shape[1], capability_of(x)), weight.nested
    nested_tensors = (weight.values, weight.values) if nested is None else (nested.table, nested.absmax)
    launch(
        nf4_product,
        own,
        own.grid(num_rows, num_outputs),
        (x, weight.codes, weight.absmax, weight.values, *nested_tensors),
        bias,
        output,
        (
            x.stride(0) // UNIT,
            num_rows,
            num_outputs,
            num_groups,
            own.splits.tiles * (TILE // GROUP),
            int(bias is not None),
            0.0 if nested is None else nested.offset,
        ),
        _constants(nested is not None, own.block_rows, own.writes_partials),
    )
    return output


def _check(x: Tensor, weight: Nf4Weight) -> tuple[int, int]:
    """Outputs, and groups of a row."""
    require_tensor("codes", weight.codes, (None, None), {torch.uint8})
    num_outputs, size = weight.codes.shape[0], 2 * weight.codes.shape[1]
    require(num_outputs > 0, "codes", "has no outputs")
    require(size > 0 and size % GROUP == 0, "codes", f"has rows of {size} inputs; give a multiple of {GROUP}")
    require_tensor("x", x, (None, size), FLOATS)
    require_unit_stride("x", x)
    require(x.stride(0) % UNIT == 0, "x", f"has rows {x.stride(0)} apart; give a multiple of {UNIT}")
    kind = torch.float32 if weight.nested is None else torch.uint8
    require_tensor("absmax", weight.absmax, (num_outputs, size // GROUP), {kind})
    require_tensor("values", weight.values, (16,), {torch.float32})
    tensors = {"codes": weight.codes, "absmax": weight.absmax, "values": weight.values}
    if weight.nested is not None:
        count = triton.cdiv(weight.absmax.numel(), NESTED_GROUP)
        require_tensor("nested.table", weight.nested.table, (256,), {torch.float32})
        require_tensor("nested.absmax", weight.nested.absmax, (count,), {torch.float32})
        tensors |= {"nested.table": weight.nested.table, "nested.absmax": weight.nested.absmax}
    for name, tensor in tensors.items():
        require(tensor.is_contiguous(), name, "is not contiguous")
    return num_outputs, size // GROUP


def _constants(is_nested: bool, block_rows: int, writes_partials: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_ROWS": block_rows,
        "TILE": TILE,
        "GROUP": GROUP,
        "NESTED_GROUP": NESTED_GROUP,
        "UNIT": UNIT,
        "IS_NESTED": is_nested,
        "PARTIAL": writes_partials,
    }


def nf4_variants() -> Iterator[Variant]:
    """Models in bfloat16, scales quantized and not."""
    numbers = dict.fromkeys(nf4_product.arg_names[8:14], "i32") | {"offset": "fp32"}
    for capability, is_nested in product(ARCHITECTURES, (False, True)):
        operands = {"x": "*bf16", "codes": "*u8", "absmax": "*u8" if is_nested else "*fp32", "values": "*fp32"}
        operands |= {"nested_table": "*fp32", "nested_absmax": "*fp32"}
        tiles, constants_of = tuned_tiles("nf4", capability), partial(_constants, is_nested)
        name = "bf16-nested" if is_nested else "bf16"
        yield from tuned_variants(nf4_product, tiles, capability, name, "bf16", operands, numbers, constants_of)
