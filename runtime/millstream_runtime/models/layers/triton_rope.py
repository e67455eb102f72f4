"""Norm, rotation and the write into the KV pool as one Triton kernel; see `millstream_kernels.elementwise`.

Importing this imports triton: only an engine that chose the kernel does (`execution.kernel_choice`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millstream_kernels.elementwise.rope_kv_write import HeadNorm, PagedPool, Rotary, rope_kv_write
from millstream_runtime.models.loading.layer_kernels import PoolPlace


@dataclass(frozen=True, slots=True)
class TritonRopeWrite:
    """See `RopeWrite`."""

    norm: HeadNorm | None

    def __call__(
        self, qkv: Tensor, num_heads: int, angles: tuple[Tensor, Tensor], positions: Tensor, place: PoolPlace
    ) -> Tensor:
        pool = PagedPool(place.stored, place.scales)
        return rope_kv_write(qkv, num_heads, Rotary(*angles), positions, place.slots, pool, norm=self.norm)
