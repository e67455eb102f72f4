"""The gated MLP (Shazeer 2020, arXiv 2002.05202): gate and up are one product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.layers.torch_layers import layers_of
from millstream_runtime.models.linear.linear import Linear, Projection
from millstream_runtime.models.linear.shares import Cut, even_share, side_by_side
from millstream_runtime.models.loading.layer_kernels import Activation, TensorLayer
from millstream_runtime.models.loading.weights import Weights


class Mlp(Protocol):
    """Dense or sparse."""

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """`residual += mlp(x)` in place; both `[T, hidden]`."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(activation(gate(x)) * up(x))`."""

    gate_up: Linear  # hidden -> 2 intermediate of this rank: gate, up
    down: Projection  # intermediate of this rank -> hidden
    gate: TensorLayer  # gate, up to activation(gate) * up

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, hidden]` to `[T, hidden]`."""
        return self.down(self._inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self.down.add_to(residual, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        return self.gate(self.gate_up(x))


def gated_mlp(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    intermediate_size: int,
    *,
    fused: bool = False,
    activation: Activation = F.silu,
    size_field: str = "intermediate_size",
    partial_sum: bool = False,
) -> GatedMlp:
    """Load one.

    Args:
        fused: whether the checkpoint has one `gate_up_proj` instead of two.
        size_field: what config.json calls `intermediate_size`, or the field that it follows from.
        partial_sum: leave the sum over the ranks to the caller.

    Raises:
        InvalidConfigError: the units do not divide among the ranks.
    """
    units = even_share(intermediate_size, weights.ranks, size_field)
    share = Cut(intermediate_size, (units,))
    parts = (
        {"gate_up_proj": side_by_side([intermediate_size] * 2, [units] * 2)}
        if fused
        else dict.fromkeys(("gate_proj", "up_proj"), share)
    )
    output = weights.partial_linear if partial_sum else weights.output_linear
    inputs = {f"{prefix}.{name}": size for name, size in parts.items()}
    return GatedMlp(
        gate_up=weights.linear(inputs, config.hidden_size, config.mlp_bias),
        down=output(f"{prefix}.down_proj", config.hidden_size, share, config.mlp_bias),
        gate=layers_of(weights).gate(activation),
    )
