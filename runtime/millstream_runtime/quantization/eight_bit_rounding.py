"""Round weights to one 8-bit code each, with a scale per output or tensor.

    int8    code in -127 .. 127, scale = max|w| / 127
    fp8     float8_e4m3, scale = max|w| / 448 (Micikevicius et al. 2022, arXiv 2209.05433)

`millstream quantize` writes these codes, and a loader that rounds weights computes with the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX, FP8_MAX = 127.0, 448.0
SMALLEST_SCALE = 2.0**-126  # of float32, normal numbers


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """`codes`: int8 or float8_e4m3 `[out, in]`; `scales`: float32 `[out, 1]` or `[1]`."""

    codes: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """float32 `[out, in]`."""
        return self.codes.float() * self.scales


def round_to_int8(weight: Tensor) -> ScaledWeight:
    """Round a float32 weight `[out, in]`, each output by its own scale."""
    scales = (weight.abs().amax(1, keepdim=True) / INT8_MAX).clamp(min=SMALLEST_SCALE)
    return ScaledWeight((weight / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales)


def round_to_fp8(weight: Tensor, *, per_tensor: bool) -> ScaledWeight:
    """Round a float32 weight `[out, in]`: each output by its own scale, or all by one."""
    largest = weight.abs().amax().reshape(1) if per_tensor else weight.abs().amax(1, keepdim=True)
    scales = (largest / FP8_MAX).clamp(min=SMALLEST_SCALE)
    return ScaledWeight((weight / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales)
