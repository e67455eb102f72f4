"""Norms and gates by torch's own operations, where no kernel was chosen for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.layers.norm import RmsNorm
from millstream_runtime.models.linear.linear import ExpertLinears, Linear
from millstream_runtime.models.loading.layer_kernels import (
    Activation,
    AddExperts,
    LayerKernels,
    RopeWrite,
    RouterSpec,
    TensorLayer,
)
from millstream_runtime.models.loading.weights import Weights
from millstream_runtime.quantization.grouped_weight import GroupedWeight

gelu_tanh: Activation = partial(F.gelu, approximate="tanh")


@dataclass(frozen=True, slots=True)
class Gate:
    """See `LayerKernels.gate`."""

    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)


class TorchLayers:
    """See `LayerKernels`."""

    def rms_norm(self, weight: Tensor, eps: float) -> TensorLayer:
        return RmsNorm(weight, eps)

    def gate(self, activation: Activation) -> TensorLayer:
        return Gate(activation)

    @property
    def linear_problem(self) -> str | None:
        return None

    @property
    def rotates(self) -> bool:
        return False

    def rope_write(self, norm_weight: Tensor | None, eps: float) -> RopeWrite | None:
        return None

    def routed_experts(self, router: RouterSpec, gate_up: ExpertLinears, down: ExpertLinears) -> AddExperts | None:
        return None

    @property
    def is_output_major(self) -> bool:
        return False

    def dense_linear(self, weight: Tensor, bias: Tensor | None) -> Linear | None:
        return None

    def packed_linear(self, weight: GroupedWeight, bias: Tensor | None) -> tuple[Linear, int] | None:
        return None


TORCH_LAYERS = TorchLayers()


def layers_of(weights: Weights) -> LayerKernels:
    """What makes the layers of these weights."""
    return TORCH_LAYERS if weights.kernels is None else weights.kernels
