"""AWQ: the scales of inputs and ranges of groups with which rounding loses least (Lin et al. 2023, arXiv 2306.00978).

Rounding costs most where activations are large. A scale s > 1 on such an input makes its weights larger, so rounding
changes them less; the inverse goes into the norm or the module before (`scale_folds`). Searched is

    s = mean|x| ^ a / mean|w| ^ b       a in [0, 1), b = 0 or 1 - a       least |W x - Q(W s) x / s|^2

then, per output and group, how much of its range is kept. Both errors follow exactly from the second moments of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.quantize.layers.input_statistics import InputStatistics
from millstream_runtime.quantize.methods.rounding import round_to_groups

NUM_EXPONENTS = 20
SHRINKS = tuple(1 - 0.05 * step for step in range(1, 11))  # of a range, down to half of it
MOST_ROWS = 1024  # of a module that the search of scales looks at; its rows lose alike
ROWS_AT_ONCE = 512
LEAST_SHARE = 1e-4  # of the mean activation: what an input counts at least


@dataclass(frozen=True, slots=True)
class ScaledModules:
    """The weights that read one scaled input, float32 `[out, in]` side by side, and its statistics."""

    weight: Tensor
    inputs: InputStatistics


def search_scales(groups: Sequence[ScaledModules], bits: int, group_size: int, *, powers_of_two: bool) -> Tensor:
    """Return the scales `[in]` of an input that all `groups` read, with the least error; ones where none helps.

    Args:
        powers_of_two: round scales to these, for a fold that must change nothing in 16 bits.
    """
    seen = [ScaledModules(_some_rows(one.weight), one.inputs) for one in groups if one.inputs.num_rows]
    num_inputs, device = groups[0].weight.shape[1], groups[0].weight.device
    best, least = torch.ones(num_inputs, device=device), float("inf")
    if not seen:
        return best
    rows = sum(one.inputs.num_rows for one in seen)
    activations = torch.stack([one.inputs.absolute_sum for one in seen]).sum(0) / rows
    activations = activations.clamp(min=float(activations.mean()) * LEAST_SHARE + 1e-12)
    weights = torch.cat([_relative(one.weight, group_size) for one in seen]).mean(0)
    for exponent, of_weights in _candidates():
        scales = activations**exponent / (weights ** (1 - exponent) + LEAST_SHARE if of_weights else 1.0)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-4, 1e4)
        if powers_of_two:
            scales = torch.exp2(scales.log2().round())
        error = sum(_error(one, scales, bits, group_size) for one in seen)
        if error < least:
            best, least = scales, error
    return best


def search_shrinks(weight: Tensor, moments: Tensor, bits: int, *, symmetric: bool = False) -> Tensor:
    """Return what is kept of the range of each output and group, `[out, groups]`, 1 where nothing smaller is better.

    `moments`: `InputStatistics.group_moments`; zeros where no row was seen.
    """
    num_groups, group_size = moments.shape[:2]
    shrinks = torch.ones(len(weight), num_groups, device=weight.device)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[start : start + ROWS_AT_ONCE]
        kept = shrinks[start : start + ROWS_AT_ONCE]
        least = None
        for shrink in (1.0, *SHRINKS):
            rounded = round_to_groups(rows, bits, group_size, torch.full_like(kept, shrink), symmetric=symmetric)
            change = (rounded.dequantized() - rows).view(len(rows), num_groups, group_size).transpose(0, 1)
            error = ((change @ moments) * change).sum(-1).t()  # [rows, groups]
            if least is None:
                least = error
                continue
            better = error < least
            least = torch.where(better, error, least)
            kept.masked_fill_(better, shrink)
    return shrinks


def _candidates() -> list[tuple[float, bool]]:
    """Exponents of activations, and whether weights count; the first changes nothing."""
    plain = [(step / NUM_EXPONENTS, False) for step in range(NUM_EXPONENTS)]
    return plain + [(step / NUM_EXPONENTS, True) for step in range(1, NUM_EXPONENTS)]


def _error(one: ScaledModules, scales: Tensor, bits: int, group_size: int) -> float:
    """The squared error of the outputs, summed over the rows that were seen."""
    change = round_to_groups(one.weight * scales, bits, group_size).dequantized() / scales - one.weight
    return float(((change @ one.inputs.second_moments) * change).sum())


def _some_rows(weight: Tensor) -> Tensor:
    return weight[:: -(-len(weight) // MOST_ROWS)]


def _relative(weight: Tensor, group_size: int) -> Tensor:
    """|weight| as a share of the largest in its group."""
    grouped = weight.abs().view(len(weight), -1, group_size)
    return (grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1)
