"""The gate of an MLP: `activation(gate) * up`, with its output quantized, in one pass.

Mathematics, per row [gate | up] of 2 n numbers, in float32, rounded once:

    silu(g) * u = g / (1 + exp(-g)) * u
    gelu_tanh(g) * u = g / (1 + exp(-2 sqrt(2 / pi) (g + 0.044715 g ** 3))) * u       1 + tanh(z) = 2 / (1 + exp(-2 z))

Quantized, a row is one program: it reads the row once for the largest number and once more, from L2, for the codes.

Bytes:  per row 2 n read, n written, of the input's size; quantized: n bytes written.
FLOPs:  about 10 n.   Memory-bound.

Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

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
BLOCK = 1024
QUANTIZING_BLOCK = 2048
NUM_WARPS = 4


class Activation(StrEnum):
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


def plan(count: int, size: int) -> tuple[int, int]:
    """Return the grid: rows, tiles of a row."""
    return count, triton.cdiv(size, BLOCK)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """`activation(gate) * up` in float32."""
    exponent = gate
    if GELU:
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-exponent)) * up


@triton.jit(do_not_specialize=["x_row", "size_units"])
def gated_tile(x, output, x_row, size_units, UNIT: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """One tile of one row. `x_row`, `size_units`: in units of `UNIT` numbers."""
    row = tl.program_id(0).to(tl.int64)
    size = size_units * UNIT
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gates = x + row * x_row * UNIT + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * size_units * UNIT + columns, gated(gate, up, GELU).to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["x_row", "size_units"])
def gated_row_quantized(
    x,
    codes,
    scales,
    x_row,
    size_units,
    limit,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    INT8: tl.constexpr,
):
    """One row; the codes are those of the rounded result."""
    row = tl.program_id(0).to(tl.int64)
    size = size_units * UNIT
    gates = x + row * x_row * UNIT
    dtype = x.dtype.element_ty
    largest = tl.zeros((1,), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        inside = columns < size
        gate = tl.load(gates + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + size + columns, mask=inside, other=0.0).to(tl.float32)
        own = largest_of(gated(gate, up, GELU).to(dtype).to(tl.float32))
        # A comparison with NaN is false: NaN, once there, stays.
        largest = tl.where(own <= largest, largest, tl.where(largest != largest, largest, own))
    scale, divisor = scale_of(largest, limit)
    tl.store(scales + row + tl.arange(0, 1), scale)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        inside = columns < size
        gate = tl.load(gates + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gates + size + columns, mask=inside, other=0.0).to(tl.float32)
        result = gated(gate, up, GELU).to(dtype).to(tl.float32)
        tl.store(codes + row * size_units * UNIT + columns, codes_of(result, divisor[:, None], INT8), mask=inside)


def gated_activation(x: Tensor, activation: Activation, *, output: Tensor | None = None) -> Tensor:
    """Return `activation(gate) * up`, `[T, size]`.

    Args:
        x: `[T, 2 * size]`, gates, then ups, in bfloat16, float16 or float32; rows are dense, their distance and `size`
            are multiples of 8 numbers.
        output: `[T, size]`, contiguous, of the same type; allocated by default.

    Raises:
        KernelArgumentError: naming the argument.
    """
    count, size = _check(x)
    if output is None:
        output = torch.empty((count, size), dtype=x.dtype, device=x.device)
    require_tensor("output", output, (count, size), {x.dtype})
    require(output.is_contiguous(), "output", "is not contiguous")
    if count:
        gated_tile[plan(count, size)](
            x,
            output,
            x.stride(0) // UNIT,
            size // UNIT,
            UNIT=UNIT,
            BLOCK=BLOCK,
            GELU=activation == Activation.GELU_TANH,
            num_warps=NUM_WARPS,
        )
    return output


def gated_activation_quantized(x: Tensor, activation: Activation, codes: Codes) -> Quantized:
    """`gated_activation`, quantized by row: the codes of what it returns. A row with NaN has a scale that is NaN.

    Raises:
        KernelArgumentError: naming the argument.
    """
    count, size = _check(x)
    result = Quantized(
        torch.empty((count, size), dtype=codes.dtype, device=x.device),
        torch.empty(count, dtype=torch.float32, device=x.device),
    )
    if count:
        gated_row_quantized[(count,)](
            x,
            result.codes,
            result.scales,
            x.stride(0) // UNIT,
            size // UNIT,
            INT8_LIMIT if codes == Codes.INT8 else E4M3_LIMIT,
            UNIT=UNIT,
            BLOCK=QUANTIZING_BLOCK,
            GELU=activation == Activation.GELU_TANH,
            INT8=codes == Codes.INT8,
            num_warps=NUM_WARPS,
        )
    return result


def _check(x: Tensor) -> tuple[int, int]:
    """Rows, and numbers of an output row."""
    require_tensor("x", x, (None, None), DTYPES)
    require_unit_stride("x", x)
    width = x.shape[1]
    require(width > 0 and width % (2 * UNIT) == 0, "x", f"has rows of {width}; give a multiple of 16")
    require(x.stride(0) % UNIT == 0, "x", f"has rows {x.stride(0)} apart; give a multiple of 8")
    return x.shape[0], width // 2


def gated_activation_variants() -> Iterator[Variant]:
    """Models in bfloat16; a variant serves every size."""
    integers = {"x_row": "i32", "size_units": "i32"}
    for activation in Activation:
        arguments = {"x": "*bf16", "output": "*bf16"} | integers
        constants: dict[str, int | bool] = {"UNIT": UNIT, "BLOCK": BLOCK, "GELU": activation == Activation.GELU_TANH}
        yield Variant(f"bf16-{activation}", gated_tile, arguments, constants, TensorCores.NONE, NUM_WARPS)
    for codes in Codes:
        kind = "*i8" if codes == Codes.INT8 else "*u8"
        arguments = {"x": "*bf16", "codes": kind, "scales": "*fp32"} | integers | {"limit": "fp32"}
        constants = {"UNIT": UNIT, "BLOCK": QUANTIZING_BLOCK, "GELU": False, "INT8": codes == Codes.INT8}
        yield Variant(f"bf16-silu-{codes}", gated_row_quantized, arguments, constants, TensorCores.NONE, NUM_WARPS)
