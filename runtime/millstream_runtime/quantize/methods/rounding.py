"""Round weights to integers with a scale and a zero point per group of inputs.

    weight[n, k] ~ (code[n, k] - zero[n, group of k]) * scale[n, group of k]

Scales are float16 in the files. They are rounded to it first and the codes follow from the rounded ones, so that the
error of a scale is corrected by its codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0  # of float16, subnormal numbers included


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A rounded weight.

    Attributes:
        codes: uint8 `[out, in]`.
        scales: float32 `[out, groups]`, each a float16 number.
        zeros: uint8 `[out, groups]`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor


def round_to_groups(weight: Tensor, bits: int, group_size: int) -> GroupedCodes:
    """Round each weight to the nearest code. `weight`: float32 `[out, in]`; `group_size` divides `in`."""
    grouped = weight.view(len(weight), -1, group_size)
    scales, zeros = _grid(grouped.amin(-1), grouped.amax(-1), bits)
    codes = (grouped / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, (1 << bits) - 1)
    return GroupedCodes(codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8))


def _grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points, both float32, of ranges of weights. Zero is always a code: sparse weights stay sparse."""
    low, high, highest = low.clamp(max=0), high.clamp(min=0), (1 << bits) - 1
    scales = ((high - low) / highest).clamp(SMALLEST_SCALE, LARGEST_SCALE).half().float()
    return scales, (-low / scales).round().clamp(0, highest)
