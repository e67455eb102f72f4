"""What makes the norms, gates, rotations, experts and linears of a model: torch, or kernels for a GPU or a CPU.

`Weights` carries one of these; families build their layers with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from millstream_runtime.models.linear.linear import ExpertLinears, Linear
from millstream_runtime.quantization.grouped_weight import GroupedWeight

Activation = Callable[[Tensor], Tensor]
TensorLayer = Callable[[Tensor], Tensor]


class PoolPlace(NamedTuple):
    """Where one step's keys and values of a layer go, for a kernel that stores them itself."""

    stored: Tensor  # [2 * KV, slots, D]: the model's numbers, or codes, int8 or uint8 (bits of float8_e4m3fn)
    scales: Tensor | None  # of int8 codes, float16 [2 * KV, slots], stored too; of float8, float32 [2 * KV]
    slots: Tensor  # [T] int64


class RopeWrite(Protocol):
    """The norm and the rotation of queries and keys, and keys and values into the pool, as one kernel."""

    def __call__(
        self, qkv: Tensor, num_heads: int, angles: tuple[Tensor, Tensor], positions: Tensor, place: PoolPlace
    ) -> Tensor:
        """`qkv` `[T, H + 2 * KV, D]`, `angles` `[positions, rotary_dim / 2]`; returns the queries `[T, H, D]`."""


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """What a router of experts computes; see `layers.moe` and `families.deepseek`."""

    gate: Tensor  # [experts, hidden]; its type is that of the product
    top_k: int
    normalise: bool
    bias: Tensor | None = None  # [experts], float32, for the choice alone; shares are a sigmoid's then
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


AddExperts = Callable[[Tensor, Tensor], None]
"""`add(residual, x)`: what the routed experts make of `x` `[T, hidden]`, added to `residual` in place."""


class LayerKernels(Protocol):
    """Makes layers from loaded weights."""

    def rms_norm(self, weight: Tensor, eps: float) -> TensorLayer:
        """A norm of `[.., size]` by `weight` `[size]`."""

    def gate(self, activation: Activation) -> TensorLayer:
        """`[T, 2 * size]`, gates, then ups, to `activation(gate) * up`, `[T, size]`."""

    @property
    def linear_problem(self) -> str | None:
        """Why the kernels of quantized linears are not used although they were chosen, once weights are loaded."""

    @property
    def rotates(self) -> bool:
        """Whether attention blocks have a `rope_write`, which wants whole tables of angles in float32."""

    def rope_write(self, norm_weight: Tensor | None, eps: float) -> RopeWrite | None:
        """`norm_weight` `[H + KV, D]`, of each query and key head; None: there is no such kernel, or torch's turn."""

    def routed_experts(self, router: RouterSpec, gate_up: ExpertLinears, down: ExpertLinears) -> AddExperts | None:
        """Routing, products by SwiGLU experts and their sum, without waiting for the device; None: torch's turn."""

    @property
    def is_output_major(self) -> bool:
        """Whether dense linear weights have to lie in memory as `[out, in]`, whatever `MemoryLayout` says."""

    def dense_linear(self, weight: Tensor, bias: Tensor | None) -> Linear | None:
        """The layer of a weight `[in, out]` of 16 or 32 bits; None: it is left to `MemoryLayout`."""

    def packed_linear(self, weight: GroupedWeight, bias: Tensor | None) -> tuple[Linear, int] | None:
        """The layer of a quantized weight, and the bytes that it takes; None: it is left to `implementations`."""
