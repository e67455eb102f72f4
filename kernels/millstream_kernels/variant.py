"""A kernel as production starts it: types of its arguments, its constants, and what its code has to look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class TensorCores(StrEnum):
    """The matrix instructions that a variant is written for."""

    NONE = "none"
    MMA = "mma.sync"  # on every GPU: tiles of 16 rows
    WGMMA = "wgmma"  # from sm_90 on, `mma.sync` before: tiles of 64 rows and more


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of a kernel. `kernel` is the function under `triton.jit`."""

    name: str  # unique among the variants of a kernel and a GPU: "bf16-head128-window"
    kernel: Any
    arguments: Mapping[str, str]  # at run time, in order: "*bf16" a pointer, "i32", "i64", "fp32"
    constants: Mapping[str, int | float | bool | None]  # the `tl.constexpr` arguments
    tensor_cores: TensorCores
    num_warps: int = 4
    num_stages: int = 3  # as of a launch that names none: the number is part of what is looked up
    # Arguments that are multiples of 16 (pointers: bytes). By default every pointer; of the others, none: a value that
    # changes its divisibility from step to step would compile anew.
    unaligned: frozenset[str] = field(default_factory=frozenset)
    capabilities: tuple[int, ...] = (80, 90)  # the GPUs that it is compiled for; 80 stands for all before sm_90
    wide_loads: bool = True  # 16 bytes in one load, where it reads what takes the time

    @property
    def kernel_name(self) -> str:
        return str(self.kernel.__name__)

    def aligned(self) -> list[str]:
        """Pointers that are promised to be multiples of 16 bytes: what loads of 16 bytes need."""
        return [name for name, kind in self.arguments.items() if kind.startswith("*") and name not in self.unaligned]
