"""Numbers to codes of one byte inside a kernel: the same codes on every GPU, and the same as torch's.

sm_80 has no instruction for float8, and `/` is not rounded correctly: both would give other codes than the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

INT8_LIMIT = 127.0
E4M3_LIMIT = 448.0


class Codes(StrEnum):
    """What a code is."""

    INT8 = "int8"  # symmetric, -127 to 127
    E4M3 = "fp8"  # the bits of float8_e4m3fn

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self == Codes.INT8 else torch.uint8


@dataclass(frozen=True, slots=True)
class Quantized:
    """`number = code * scale`, one scale per row."""

    codes: Tensor  # [T, size], int8; uint8, the bits of float8_e4m3fn
    scales: Tensor  # [T], float32; 0: a row of zeros


@triton.jit
def int8_codes(numbers):
    """float32, whole numbers of -127 to 127 after rounding half to even, to int8; NaN becomes 1."""
    # Beyond 2 ** 23 float32 has no fractions: the sum is rounded to a whole number, half to even.
    whole = (numbers + 12582912.0) - 12582912.0
    whole = tl.where(whole != whole, 1.0, whole)
    return tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)


@triton.jit
def e4m3_codes(numbers):
    """float32 to the bits of float8_e4m3fn, half to even; beyond 448 becomes 448, an infinity NaN, as in the engine."""
    bits = numbers.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    absolute = tl.minimum(tl.abs(tl.where(finite, numbers, 0.0)), 448.0)
    magnitude = absolute.to(tl.uint32, bitcast=True)
    # 3 of 23 bits of the mantissa stay; the exponent's bias is 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2 ** -6 codes count multiples of 2 ** -9: float32's last bit is 1 from 2 ** 23 on.
    small = (absolute * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return tl.where(finite, sign | code, 0x7F).to(tl.uint8)


@triton.jit
def scale_of(largest, limit):
    """The scale of a row, and what to divide its numbers by: infinity where the scale is 0, so that codes are 0."""
    scale = tl.div_rn(largest, limit)
    return scale, tl.where(scale == 0.0, float("inf"), scale)


@triton.jit
def largest_of(numbers):
    """Largest absolute number of each row `[rows, size]`; NaN of a row with NaN, which `tl.max` would leave out."""
    is_nan = tl.max((numbers != numbers).to(tl.int32), 1) > 0
    return tl.where(is_nan, float("nan"), tl.max(tl.abs(numbers), 1))


@triton.jit
def codes_of(numbers, divisor, INT8: tl.constexpr):
    """`numbers / divisor` as codes."""
    quotients = tl.div_rn(numbers, divisor)
    return int8_codes(quotients) if INT8 else e4m3_codes(quotients)
