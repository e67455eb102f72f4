"""GPTQ: round the inputs of a weight one after another, and let those that follow make up for each error.

Frantar et al. 2022, arXiv 2210.17323. With M the second moments of the inputs and U the upper Cholesky factor of their
inverse, rounding input k with error e changes the weights of all later inputs j by -e * U[k, j] / U[k, k].

Act-order takes the inputs with the largest moments first, when most others are left to make up for them. `static` keeps
the groups of the file's order, so that any loader reads them; `group` puts inputs that follow one another in this order
into one group, which the file then names per input (`g_idx`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.quantize.layers.input_statistics import InputStatistics
from millstream_runtime.quantize.methods.awq_search import search_shrinks
from millstream_runtime.quantize.methods.inverse_factor import InverseFactor, inverse_factor
from millstream_runtime.quantize.methods.rounding import GroupedCodes, grid_of_groups, round_to_groups
from millstream_runtime.quantize.settings import ActOrder

LEAST_BLOCK = 128  # inputs whose later changes are applied at once


@dataclass(frozen=True, slots=True)
class RoundingOrder:
    """What all modules that read one input share.

    Attributes:
        order: int64 `[in]`, the inputs in the order of rounding.
        factor: U, in that order; None where no data was seen.
        group_moments: see `InputStatistics.group_moments`.
    """

    order: Tensor
    factor: InverseFactor | None
    group_moments: Tensor
    act_order: ActOrder

    @classmethod
    def of(cls, inputs: InputStatistics, group_size: int, act_order: ActOrder, damping: float) -> RoundingOrder:
        """`inputs` lose their second moments: for a wide module they are the largest thing in memory.

        Args:
            damping: share of the mean of M's diagonal that is added to it.
        """
        group_moments = inputs.group_moments(group_size)
        moments, inputs.moment_sum = inputs.second_moments, None
        diagonal = moments.diagonal()
        mean = float(diagonal.mean())
        diagonal += torch.where(diagonal <= 0, mean, 0.0)
        order = torch.arange(len(moments), device=moments.device)
        if act_order is not ActOrder.NONE:
            order = diagonal.argsort(descending=True, stable=True)
        factor = inverse_factor(moments, order, damping * mean) if mean > 0 else None
        return cls(order, factor, group_moments, act_order)


def solve(weight: Tensor, shared: RoundingOrder, bits: int, group_size: int, *, symmetric: bool) -> GroupedCodes:
    """Round `weight`, float32 `[out, in]`."""
    if shared.factor is None:
        return round_to_groups(weight, bits, group_size, symmetric=symmetric)
    order = shared.order
    position = torch.arange(weight.shape[1], device=weight.device) // group_size
    groups = position[order.argsort()] if shared.act_order is ActOrder.GROUP else position  # of each input
    grid = None
    if shared.act_order is ActOrder.STATIC:
        shrinks = search_shrinks(weight, shared.group_moments, bits, symmetric=symmetric)
        grid = grid_of_groups(weight.view(len(weight), -1, group_size), bits, shrinks, symmetric=symmetric)
    rounding = _Rounding(bits, group_size, symmetric, groups[order], grid)
    codes, scales, zeros = rounding.run(weight[:, order], shared.factor)
    found = torch.empty_like(codes)
    found[:, order] = codes
    return GroupedCodes(found, scales, zeros, groups)


class _Rounding:
    """The inputs in the order of rounding: `groups[k]` of the k-th; `grid`: of all groups, where it is known before."""

    def __init__(
        self, bits: int, group_size: int, symmetric: bool, groups: Tensor, grid: tuple[Tensor, Tensor] | None
    ) -> None:
        self._bits, self._group_size, self._symmetric = bits, group_size, symmetric
        self._groups, self._grid = groups, grid

    def run(self, weight: Tensor, factor: InverseFactor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes uint8 `[out, in]`, scales and zero points `[out, groups]`. `weight` is changed."""
        num_outputs, num_inputs = weight.shape
        num_groups = num_inputs // self._group_size
        if self._grid is not None:
            scales, zeros = self._grid
        else:
            scales = torch.empty(num_outputs, num_groups, device=weight.device)
            zeros = torch.empty_like(scales)
        codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=weight.device)
        block = max(LEAST_BLOCK, self._group_size)
        for start in range(0, num_inputs, block):
            stop = min(start + block, num_inputs)
            rows = factor.rows(start, stop)
            found, errors = self._block(weight[:, start:stop].t().contiguous(), start, rows, scales, zeros)
            codes[:, start:stop] = found.t()
            weight[:, stop:].addmm_(errors.t(), rows[:, stop - start :], alpha=-1)
        return codes, scales, zeros.to(torch.uint8)

    def _block(self, block: Tensor, start: int, factor: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        """Codes uint8 and errors, `[block, out]`, of neighbours in the order of rounding.

        Args:
            block: their weights, `[block, out]`; is changed.
            start: the first one's place in the order.
            factor: rows of U, from the column `start` on.
            scales, zeros: `[out, groups]`; filled here where they were not known before.
        """
        codes = torch.empty(block.shape, dtype=torch.uint8, device=block.device)
        errors = torch.empty_like(block)
        groups = self._groups[start : start + len(block)].tolist()
        for index, group in enumerate(groups):
            if self._grid is None and (start + index) % self._group_size == 0:
                run = block[index : index + self._group_size].t().unsqueeze(1)
                scale, zero = grid_of_groups(run, self._bits, None, symmetric=self._symmetric)
                scales[:, group], zeros[:, group] = scale[:, 0], zero[:, 0]
            scale, zero = scales[:, group], zeros[:, group]
            code = (block[index] / scale).round_().add_(zero).clamp_(0, (1 << self._bits) - 1)
            codes[index] = code.to(torch.uint8)
            error = torch.div(block[index] - (code - zero) * scale, factor[index, index], out=errors[index])
            block[index:].addr_(factor[index, index : len(block)], error, alpha=-1)
        return codes, errors
