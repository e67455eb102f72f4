"""RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467): layer norm without the mean, hence without a bias.

By torch, where no kernel was chosen (`layer_kernels`). The arithmetic is in float32 at least, and rounds to 16 bits
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension."""

    weight: Tensor  # [size]; its type is that of the arithmetic, the input's or a wider one
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """`[.., size]` to the same in the input's type."""
        weight = self.weight
        wide = x if x.dtype == weight.dtype else x.to(weight.dtype)
        normed = F.rms_norm(wide, weight.shape, weight, self.eps)
        return normed if normed.dtype == x.dtype else normed.to(x.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """An RMS norm over each head, the heads with weights of their own."""

    weight: Tensor  # [heads, D]; its type is that of the arithmetic, the input's or a wider one
    eps: float

    def __call__(self, heads: Tensor) -> Tensor:
        """`[T, heads, D]` to the same."""
        weight = self.weight
        wide = heads if heads.dtype == weight.dtype else heads.to(weight.dtype)
        return F.rms_norm(wide, weight.shape[1:], None, self.eps).mul_(weight)

    def norm_first(self, heads: Tensor) -> None:
        """Norm the first heads of `[T, more heads, D]` in place, as many as there are weights.

        On CUDA the others pass through the kernel too: it wants rows without gaps, and copying these costs more.
        """
        first = heads[:, : len(self.weight)]
        if not heads.is_cuda or heads.dtype != self.weight.dtype:
            first.copy_(self(first))
        else:
            normed = F.rms_norm(heads, self.weight.shape[1:], None, self.eps)
            torch.mul(normed[:, : len(self.weight)], self.weight, out=first)
