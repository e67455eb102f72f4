"""oneDNN's bfloat16 product for CPUs without one: float64 sums of bfloat16 numbers, rounded to bfloat16 once."""

from __future__ import annotations

import torch
from torch import Tensor


class ExactOperations:
    """See `millstream_kernels.cpu.bfloat16.product.Operations`."""

    def refusal(self) -> str | None:
        return None

    def pack(self, weight: Tensor) -> Tensor:
        assert weight.dtype is torch.bfloat16
        assert weight.is_contiguous()
        return weight.double()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.bfloat16()

    def product(self, x: Tensor, packed: Tensor) -> Tensor:
        assert x.dtype is torch.bfloat16
        assert len(x)
        return torch.mm(x.double(), packed.t()).bfloat16()
