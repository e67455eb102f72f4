"""RMS norm, with the residual added before it and its output quantized, in one pass.

Mathematics, per row of n numbers, in float32:

    r = round(residual + x)                   stored as the new residual
    y = round(r / sqrt(mean(r ** 2) + eps) * w)         usual; Gemma: * (1 + w)
    y = round(round(r / sqrt(mean(r ** 2) + eps)) * w)  `cast_before_weight`, as Llama's reference
    code = round(y / s),  s = max|y| / limit  quantized: int8 (127) or e4m3 (448), one scale per row

A row is one program and stays in registers, so its result depends on nothing but itself.

Bytes:  per row 2 n of the input's size, 4 n with a residual; n of the output are 1 byte each when quantized.
FLOPs:  about 4 n.   Memory-bound.

Zhang and Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.elementwise.codes import (
    E4M3_LIMIT,
    INT8_LIMIT,
    Codes,
    Quantized,
    codes_of,
    largest_of,
    scale_of,
)
from millstream_kernels.variant import TensorCores, Variant

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
UNIT = 8  # sizes and strides are passed in units of 8 numbers: 16 bytes of 16 bits, and the compiler knows it
MAX_SIZE = 16384


@dataclass(frozen=True, slots=True)
class NormPlan:
    """Follows from the size of a row alone."""

    block: int
    num_warps: int


def plan(size: int) -> NormPlan:
    """Return how a row of `size` numbers is computed."""
    block = max(256, triton.next_power_of_2(size))
    return NormPlan(block, min(16, max(1, block // 512)))


@triton.jit(do_not_specialize=["x_row", "residual_row", "size_units"])
def rms_norm_row(
    x,
    residual,
    weight,
    output,
    scales,
    x_row,
    residual_row,
    size_units,
    eps,
    limit,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ONE_PLUS_WEIGHT: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    QUANTIZES: tl.constexpr,
    INT8: tl.constexpr,
):
    """One row. `x_row`, `residual_row`, `size_units`: in units of `UNIT` numbers."""
    row = tl.program_id(0).to(tl.int64)
    size = size_units * UNIT
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < size
    dtype = x.dtype.element_ty
    numbers = tl.load(x + row * x_row * UNIT + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        places = residual + row * residual_row * UNIT + columns
        total = (numbers + tl.load(places, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(places, total, mask=inside)
        numbers = total.to(tl.float32)
    mean = tl.div_rn(tl.sum(numbers * numbers, 1), size.to(tl.float32))
    normed = tl.div_rn(numbers, tl.sqrt_rn(mean + eps)[:, None])
    if CAST_BEFORE_WEIGHT:
        normed = normed.to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if ONE_PLUS_WEIGHT:
        weights += 1.0
    result = (normed * weights).to(dtype)
    places_out = output + row * size_units * UNIT + columns
    if QUANTIZES:
        rounded = tl.where(inside, result.to(tl.float32), 0.0)
        scale, divisor = scale_of(largest_of(rounded), limit)
        tl.store(places_out, codes_of(rounded, divisor[:, None], INT8), mask=inside)
        tl.store(scales + row + tl.arange(0, 1), scale)
    else:
        tl.store(places_out, result, mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    one_plus_weight: bool = False,
    cast_before_weight: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """Norm the rows of `x`.

    Args:
        x: `[T, size]` in bfloat16, float16 or float32; dense rows, strides that are multiples of 8 numbers.
        weight: `[size]`, of any of these types.
        residual: like `x`; it becomes `residual + x`, and that is normed.
        one_plus_weight: multiply by `1 + weight` (Gemma).
        cast_before_weight: round to the type of `x` before the weight too (Llama's reference).
        output: contiguous, like `x`; allocated by default.

    Returns: `output`.

    Raises:
        KernelArgumentError: naming the argument.
    """
    _check(x, weight, residual)
    if output is None:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    require_tensor("output", output, tuple(x.shape), {x.dtype})
    require(output.is_contiguous(), "output", "is not contiguous")
    _launch(
        x, weight, eps, residual, output, None, _constants(x.shape[1], residual, one_plus_weight, cast_before_weight)
    )
    return output


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor,
    eps: float,
    codes: Codes,
    *,
    residual: Tensor | None = None,
    one_plus_weight: bool = False,
    cast_before_weight: bool = False,
) -> Quantized:
    """`rms_norm`, quantized by row: the codes of what `rms_norm` returns. A row with NaN has a scale that is NaN.

    Raises:
        KernelArgumentError: naming the argument.
    """
    _check(x, weight, residual)
    result = Quantized(
        torch.empty(x.shape, dtype=codes.dtype, device=x.device),
        torch.empty(x.shape[0], dtype=torch.float32, device=x.device),
    )
    constants = _constants(x.shape[1], residual, one_plus_weight, cast_before_weight, codes)
    _launch(x, weight, eps, residual, result.codes, result.scales, constants)
    return result


def _launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    output: Tensor,
    scales: Tensor | None,
    constants: dict[str, int | bool],
) -> None:
    count, size = x.shape
    if count == 0:
        return
    added = x if residual is None else residual
    rms_norm_row[(count,)](
        x,
        added,
        weight,
        output,
        x if scales is None else scales,
        x.stride(0) // UNIT,
        added.stride(0) // UNIT,
        size // UNIT,
        eps,
        INT8_LIMIT if constants["INT8"] else E4M3_LIMIT,
        **constants,
        num_warps=plan(size).num_warps,
    )


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    require_tensor("x", x, (None, None), DTYPES)
    require_unit_stride("x", x)
    size = x.shape[1]
    require(0 < size <= MAX_SIZE and size % UNIT == 0, "x", f"has rows of {size}; give a multiple of 8, at most 16384")
    require_tensor("weight", weight, (size,), DTYPES)
    require_unit_stride("weight", weight)
    for name, rows in (("x", x), ("residual", residual)):
        if rows is None:
            continue
        require_tensor(name, rows, tuple(x.shape), {x.dtype})
        require_unit_stride(name, rows)
        require(rows.stride(0) % UNIT == 0, name, f"has rows {rows.stride(0)} apart; give a multiple of 8")
    # Broadcast rows would be written by several programs at once.
    spread = residual is None or residual.shape[0] <= 1 or residual.stride(0) >= size
    require(spread, "residual", "has rows that overlap")


def _constants(
    size: int,
    residual: object,
    one_plus_weight: bool = False,
    cast_before_weight: bool = False,
    codes: Codes | None = None,
) -> dict[str, int | bool]:
    return {
        "UNIT": UNIT,
        "BLOCK": plan(size).block,
        "HAS_RESIDUAL": residual is not None,
        "ONE_PLUS_WEIGHT": one_plus_weight,
        "CAST_BEFORE_WEIGHT": cast_before_weight,
        "QUANTIZES": codes is not None,
        "INT8": codes == Codes.INT8,
    }


def rms_norm_variants() -> Iterator[Variant]:
    """Models in bfloat16 with rows of 1025 to 8192, the weight in bfloat16 or, as Gemma's, float32."""
    for size in (2048, 4096, 8192):
        for residual, weight, codes in (
            (None, "bf16", None),
            (True, "bf16", None),
            (True, "fp32", None),
            (True, "bf16", Codes.INT8),
            (True, "bf16", Codes.E4M3),
        ):
            kind = f"{size}{'-residual' if residual else ''}-weight-{weight}{f'-{codes}' if codes else ''}"
            code = {None: "*bf16", Codes.INT8: "*i8", Codes.E4M3: "*u8"}[codes]
            arguments = {"x": "*bf16", "residual": "*bf16", "weight": f"*{weight}", "output": code}
            arguments |= {"scales": "*fp32" if codes else "*bf16"}
            arguments |= dict.fromkeys(("x_row", "residual_row", "size_units"), "i32") | {
                "eps": "fp32",
                "limit": "fp32",
            }
            constants = _constants(size, residual, codes=codes)
            yield Variant(kind, rms_norm_row, arguments, constants, TensorCores.NONE, plan(size).num_warps)
