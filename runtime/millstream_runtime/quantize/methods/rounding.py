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
ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A rounded weight.

    Attributes:
        codes: uint8 `[out, in]`.
        scales: float32 `[out, groups]`, each a float16 number.
        zeros: uint8 `[out, groups]`.
        group_of_input: int64 `[in]`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of_input: Tensor

    def dequantized(self) -> Tensor:
        """float32 `[out, in]`, exactly what a loader computes with."""
        found = torch.empty(self.codes.shape, device=self.codes.device)
        for start in range(0, len(found), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            zeros, scales = (
                one[rows].float().index_select(1, self.group_of_input) for one in (self.zeros, self.scales)
            )
            torch.mul(self.codes[rows].float().sub_(zeros), scales, out=found[rows])
        return found


def grid_of_groups(grouped: Tensor, bits: int, shrinks: Tensor | None, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points, both float32 `[out, groups]`. Zero is always a code: sparse weights stay sparse.

    Args:
        grouped: float32 `[out, groups, group]`.
        shrinks: `[out, groups]`, what is kept of the range of each group; weights beyond it become its ends.
        symmetric: the zero point is the middle of the codes, as kernels of some servers ask for.
    """
    low, high, highest = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0), (1 << bits) - 1
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    if shrinks is not None:
        low, high = low * shrinks, high * shrinks
    scales = ((high - low) / highest).clamp(SMALLEST_SCALE, LARGEST_SCALE).half().float()
    if symmetric:
        return scales, torch.full_like(scales, 1 << (bits - 1))
    return scales, (-low / scales).round().clamp(0, highest)


def round_to_groups(
    weight: Tensor, bits: int, group_size: int, shrinks: Tensor | None = None, *, symmetric: bool = False
) -> GroupedCodes:
    """Round each weight to the nearest code. `weight`: float32 `[out, in]`; `group_size` divides `in`."""
    grouped = weight.view(len(weight), -1, group_size)
    scales, zeros = grid_of_groups(grouped, bits, shrinks, symmetric=symmetric)
    codes = (grouped / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, (1 << bits) - 1)
    group_of_input = torch.arange(weight.shape[1], device=weight.device) // group_size
    return GroupedCodes(codes.flatten(1).to(torch.uint8), scales, zeros.to(torch.uint8), group_of_input)
