"""Rows to codes of one byte, each by its own largest number: activations for a product of 8 bits.

Mathematics, per row of n numbers, in float32:

    s = max|x| / limit      code = round(x / s)         int8 (limit 127), or e4m3 (448)

A row is one program and stays in registers. Where a norm or a gate comes before the product, they give the same codes
themselves (`rms_norm_quantized`, `gated_activation`) and this pass is not needed.

Bytes:  per row n of the input's size read, n of 1 byte written.
FLOPs:  about 3 n.   Memory-bound.

Dettmers et al. 2022 (arXiv 2208.07339) for one scale per row.
"""

from __future__ import annotations

from collections.abc import Iterator

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
UNIT = 16  # sizes and strides are passed in units of 16 numbers, as the product of 8 bits wants them
MAX_SIZE = 32768


def plan(size: int) -> tuple[int, int]:
    """Return the block and the warps of a row of `size` numbers."""
    block = max(256, triton.next_power_of_2(size))
    return block, min(16, max(1, block // 512))


@triton.jit(do_not_specialize=["x_row", "size_units"])
def quantize_row(
    x, codes, scales, x_row, size_units, limit, UNIT: tl.constexpr, BLOCK: tl.constexpr, INT8: tl.constexpr
):
    """One row. `x_row`, `size_units`: in units of `UNIT` numbers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < size_units * UNIT
    numbers = tl.load(x + row * x_row * UNIT + columns, mask=inside, other=0.0).to(tl.float32)
    scale, divisor = scale_of(largest_of(numbers), limit)
    tl.store(codes + row * size_units * UNIT + columns, codes_of(numbers, divisor[:, None], INT8), mask=inside)
    tl.store(scales + row + tl.arange(0, 1), scale)


def quantize_rows(x: Tensor, codes: Codes) -> Quantized:
    """Return the codes of the rows of `x`. A row with NaN has a scale that is NaN, one of zeros the scale 0.

    Args:
        x: `[T, size]` in bfloat16, float16 or float32; dense rows, size and strides are multiples of 16 numbers.

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("x", x, (None, None), DTYPES)
    require_unit_stride("x", x)
    count, size = x.shape
    fits = 0 < size <= MAX_SIZE and size % UNIT == 0
    require(fits, "x", f"has rows of {size}; give a multiple of {UNIT}, at most {MAX_SIZE}")
    require(x.stride(0) % UNIT == 0, "x", f"has rows {x.stride(0)} apart; give a multiple of {UNIT}")
    result = Quantized(
        torch.empty(x.shape, dtype=codes.dtype, device=x.device),
        torch.empty(count, dtype=torch.float32, device=x.device),
    )
    if count:
        num_warps = plan(size)[1]
        limit = INT8_LIMIT if codes == Codes.INT8 else E4M3_LIMIT
        constants = _constants(size, codes)
        quantize_row[(count,)](
            x,
            result.codes,
            result.scales,
            x.stride(0) // UNIT,
            size // UNIT,
            limit,
            **constants,
            num_warps=num_warps,
        )
    return result


def _constants(size: int, codes: Codes) -> dict[str, int | bool]:
    return {"UNIT": UNIT, "BLOCK": plan(size)[0], "INT8": codes == Codes.INT8}


def quantize_rows_variants() -> Iterator[Variant]:
    """Models in bfloat16 with rows of 2049 to 16384; int8, which the engine has activations of."""
    for size in (4096, 8192, 16384):
        arguments = {"x": "*bf16", "codes": "*i8", "scales": "*fp32"}
        arguments |= {"x_row": "i32", "size_units": "i32", "limit": "fp32"}
        constants = _constants(size, Codes.INT8)
        yield Variant(f"{size}-int8", quantize_row, arguments, constants, TensorCores.NONE, plan(size)[1])
