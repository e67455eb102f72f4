"""Norms, gates, rotations and products by weights of 4 to 16 bits by the Triton kernels of `millstream_kernels`.

Importing this imports triton: only an engine that chose these kernels does (`execution.kernel_choice`). What a kernel
does not take, such as a size that is no multiple of 8, is left to torch layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from millstream_kernels.elementwise.gated_activation import Activation as KernelActivation
from millstream_kernels.elementwise.gated_activation import gated_activation
from millstream_kernels.elementwise.rms_norm import MAX_SIZE, UNIT, rms_norm
from millstream_kernels.elementwise.rope_kv_write import HeadNorm
from millstream_runtime.models.layers.torch_layers import TORCH_LAYERS, gelu_tanh
from millstream_runtime.models.layers.triton_experts import triton_experts
from millstream_runtime.models.layers.triton_linear import triton_dense_linear
from millstream_runtime.models.layers.triton_rope import TritonRopeWrite
from millstream_runtime.models.linear.linear import ExpertLinears, Linear
from millstream_runtime.models.loading.layer_kernels import Activation, AddExperts, RopeWrite, RouterSpec, TensorLayer
from millstream_runtime.quantization.gpu.int4_linear import TritonInt4Linear, int4_weight
from millstream_runtime.quantization.gpu.int8_linear import int8_linear
from millstream_runtime.quantization.gpu.kernel_check import KernelCheck
from millstream_runtime.quantization.gpu.nf4_linear import TritonNf4Linear, nf4_weight
from millstream_runtime.quantization.gpu.weight_only_linear import weight_only_linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight

ACTIVATIONS = {F.silu: KernelActivation.SILU, gelu_tanh: KernelActivation.GELU_TANH}


@dataclass(frozen=True, slots=True)
class TritonNorm:
    """See `LayerKernels.rms_norm`."""

    weight: Tensor  # [size]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x.view(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


@dataclass(frozen=True, slots=True)
class TritonGate:
    """See `LayerKernels.gate`."""

    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-1] % (2 * UNIT):
            return TORCH_LAYERS.gate(self.activation)(x)
        return gated_activation(x, ACTIVATIONS[self.activation])


@dataclass(frozen=True, slots=True)
class TritonLayers:
    """See `LayerKernels`. Each part as it was chosen. `check`: of products by quantized weights, None: they are taken
    as they are."""

    norms: bool
    activations: bool
    linears: bool  # by quantized weights
    rotates: bool
    experts: bool
    dense_linears: bool = False  # by weights of 16 bits
    check: KernelCheck | None = field(default=None, compare=False)

    @property
    def linear_problem(self) -> str | None:
        return None if self.check is None else self.check.problem

    def rms_norm(self, weight: Tensor, eps: float) -> TensorLayer:
        size = weight.shape[0]
        if not self.norms or size % UNIT or size > MAX_SIZE:
            return TORCH_LAYERS.rms_norm(weight, eps)
        return TritonNorm(weight, eps)

    def gate(self, activation: Activation) -> TensorLayer:
        if not self.activations or activation not in ACTIVATIONS:
            return TORCH_LAYERS.gate(activation)
        return TritonGate(activation)

    def rope_write(self, norm_weight: Tensor | None, eps: float) -> RopeWrite | None:
        if not self.rotates:
            return None
        return TritonRopeWrite(None if norm_weight is None else HeadNorm(norm_weight.contiguous(), eps))

    def routed_experts(self, router: RouterSpec, gate_up: ExpertLinears, down: ExpertLinears) -> AddExperts | None:
        return triton_experts(router, gate_up, down, dense_router=self.dense_linears) if self.experts else None

    @property
    def is_output_major(self) -> bool:
        return self.dense_linears

    def dense_linear(self, weight: Tensor, bias: Tensor | None) -> Linear | None:
        return triton_dense_linear(weight, bias) if self.dense_linears else None

    def packed_linear(self, weight: GroupedWeight, bias: Tensor | None) -> tuple[Linear, int] | None:
        made = _packed_linear(weight, bias) if self.linears else None
        if made is None or self.check is None:
            return made
        return made if self.check.passes(made[0], weight) else None


def _packed_linear(weight: GroupedWeight, bias: Tensor | None) -> tuple[Linear, int] | None:
    if weight.bits == 8:
        linear = int8_linear(weight, bias) or weight_only_linear(weight, bias)
        return None if linear is None else (linear, linear.num_bytes)
    if weight.values is not None:
        of_values = nf4_weight(weight)
        return None if of_values is None else (TritonNf4Linear(of_values, bias), of_values.num_bytes)
    repacked = int4_weight(weight)
    return None if repacked is None else (TritonInt4Linear(repacked, bias), repacked.num_bytes)
