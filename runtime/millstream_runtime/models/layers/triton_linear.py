"""A linear layer over a weight of 16 bits: few rows by a Triton kernel, more by torch; see `linear.w16a16`.

Importing this imports triton: only an engine that chose the kernels does (`execution.kernel_choice`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millstream_kernels.linear.w16a16 import MAX_ROWS, UNIT, unsupported, w16a16_linear
from millstream_runtime.models.linear.linear import DenseLinear, Linear


@dataclass(frozen=True, slots=True)
class TritonDenseLinear(DenseLinear):
    """`x @ weight + bias`, the weight as `[out, in]` in memory. Up to `MAX_ROWS` rows a row has one result."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, out]`."""
        if x.shape[0] > MAX_ROWS:
            return DenseLinear.__call__(self, x)
        if x.stride(1) != 1 or x.stride(0) % UNIT:
            x = x.contiguous()
        return w16a16_linear(x, self.weight.t(), self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += self(x)` in place."""
        if x.shape[0] > MAX_ROWS:
            DenseLinear.add_to(self, residual, x)
        else:
            residual.add_(self(x))

    def reordered(self, order: list[int]) -> Linear:
        return TritonDenseLinear(*self._reordered_tensors(order))


def triton_dense_linear(weight: Tensor, bias: Tensor | None) -> TritonDenseLinear | None:
    """The layer of a weight `[in, out]`; None where the kernel does not take it: sizes that are no multiple of 8."""
    return TritonDenseLinear(weight, bias) if unsupported(weight.t()) is None else None
