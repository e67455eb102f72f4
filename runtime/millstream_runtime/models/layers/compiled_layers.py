"""Norms, gates and rotations by the kernels that were compiled for a CPU (`millstream_kernels.cpu.layers`).

A decode of a small model spends a fifth of its time there (`benchmarks.cpu_mechanisms`): torch needs some 20 operations
per layer, these kernels four calls. They compute in float32; a weight of another type leaves its norm to torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_kernels.cpu.layers import gated_activation, rms_norm, rope_kv_write
from millstream_kernels.cpu.task import ActivationKind
from millstream_runtime.models.layers.torch_layers import TorchLayers, gelu_tanh
from millstream_runtime.models.loading.layer_kernels import Activation, PoolPlace, RopeWrite, TensorLayer

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode

KINDS = {F.silu: ActivationKind.SILU, gelu_tanh: ActivationKind.GELU_TANH}


@dataclass(frozen=True, slots=True)
class CompiledNorm:
    """See `LayerKernels.rms_norm`."""

    code: LoadedCode
    weight: Tensor  # [size]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(self.code, x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class CompiledGate:
    """See `LayerKernels.gate`."""

    code: LoadedCode
    kind: ActivationKind

    def __call__(self, x: Tensor) -> Tensor:
        return gated_activation(self.code, x, self.kind)


@dataclass(frozen=True, slots=True)
class CompiledRopeWrite:
    """See `RopeWrite`."""

    code: LoadedCode
    norm_weight: Tensor | None
    eps: float

    def __call__(
        self, qkv: Tensor, num_heads: int, angles: tuple[Tensor, Tensor], positions: Tensor, place: PoolPlace
    ) -> Tensor:
        return rope_kv_write(
            self.code, qkv, num_heads, angles, positions, place.slots, place.stored, self.norm_weight, self.eps
        )


class CompiledLayers(TorchLayers):
    """See `LayerKernels`: products and experts are torch's."""

    def __init__(self, code: LoadedCode, *, rotates: bool) -> None:
        """`rotates`: whether keys and values are stored as the model computes them, one head for each key."""
        self._code = code
        self._rotates = rotates

    def rms_norm(self, weight: Tensor, eps: float) -> TensorLayer:
        if weight.dtype is not torch.float32:
            return super().rms_norm(weight, eps)
        return CompiledNorm(self._code, weight.contiguous(), eps)

    def gate(self, activation: Activation) -> TensorLayer:
        kind = KINDS.get(activation)
        return super().gate(activation) if kind is None else CompiledGate(self._code, kind)

    @property
    def rotates(self) -> bool:
        return self._rotates

    def rope_write(self, norm_weight: Tensor | None, eps: float) -> RopeWrite | None:
        if not self._rotates:
            return None
        return CompiledRopeWrite(self._code, None if norm_weight is None else norm_weight.contiguous(), eps)
