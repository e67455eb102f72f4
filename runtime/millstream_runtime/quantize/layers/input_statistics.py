"""What calibration keeps of the inputs of a linear module: no rows, so memory does not grow with them.

second moments   sum of x x^T, [in, in]     the error of a changed weight W + D on the data is trace(D M D^T),
                                            exactly: so AWQ's and GPTQ's objectives need no rows
mean |x|         [in]                       AWQ's importance of an input
max |x|          [in]                       SmoothQuant, static scales of activations
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class InputStatistics:
    """Sums over the rows so far, float32. `moment_sum` None: second moments were not asked for."""

    num_rows: int
    absolute_sum: Tensor  # [in]
    absolute_max: Tensor  # [in]
    moment_sum: Tensor | None  # [in, in]

    @classmethod
    def empty(cls, num_inputs: int, device: torch.device, *, with_moments: bool) -> InputStatistics:
        zeros = torch.zeros(num_inputs, device=device)
        moments = torch.zeros(num_inputs, num_inputs, device=device) if with_moments else None
        return cls(0, zeros, zeros.clone(), moments)

    def add(self, x: Tensor) -> None:
        """Count the rows of `x`, `[T, in]`."""
        if not len(x):
            return
        absolute = x.abs()
        self.num_rows += len(x)
        self.absolute_sum += absolute.sum(0)
        self.absolute_max = torch.maximum(self.absolute_max, absolute.amax(0))
        if self.moment_sum is not None:
            self.moment_sum.addmm_(x.t(), x)

    @property
    def second_moments(self) -> Tensor:
        """The sum of x x^T, `[in, in]`; not a copy. Raises ValueError: they were not asked for."""
        if self.moment_sum is None:
            raise ValueError("second moments were not collected")
        return self.moment_sum

    def group_moments(self, group_size: int) -> Tensor:
        """The part of it within each group of inputs, `[groups, group, group]`."""
        num_groups = len(self.second_moments) // group_size
        blocks = self.second_moments.view(num_groups, group_size, num_groups, group_size)
        return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()

    def divide(self, scales: Tensor) -> None:
        """As if every row had been divided by `scales` `[in]`."""
        self.absolute_sum /= scales
        self.absolute_max /= scales
        if self.moment_sum is not None:
            self.moment_sum /= scales
            self.moment_sum /= scales.unsqueeze(1)
