"""What makes the norms, the gates and the packed linears of a model: torch, or Triton kernels.

`Weights` carries one of these; families build their layers with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight

Activation = Callable[[Tensor], Tensor]
TensorLayer = Callable[[Tensor], Tensor]


class LayerKernels(Protocol):
    """Makes layers from loaded weights."""

    def rms_norm(self, weight: Tensor, eps: float) -> TensorLayer:
        """A norm of `[.., size]` by `weight` `[size]`."""

    def gate(self, activation: Activation) -> TensorLayer:
        """`[T, 2 * size]`, gates, then ups, to `activation(gate) * up`, `[T, size]`."""

    def packed_linear(self, weight: GroupedWeight, bias: Tensor | None) -> tuple[Linear, int] | None:
        """The layer of a quantized weight, and the bytes that it takes; None: it is left to `implementations`."""
