"""Sums of few numbers over all GPUs of a pod by torch's symmetric memory, where NVLink joins them; NCCL does the rest.

    rank 0    partial ──▶ buffer ◀─┐ read by all     A rank copies its part into a buffer that the others may read, and
    rank 1    partial ──▶ buffer ◀─┤                 adds all buffers in the order of the ranks: one launch, no ring.
    rank 2    partial ──▶ buffer ◀─┘

The order of a sum is the same on every rank and for every row of a tensor. NCCL does not promise that: it chooses an
algorithm by the size. Sums by the switch itself (multimem) leave the order to it, and are not used.

No machine with several GPUs has run this. So it is used only where it is asked for (SWITCH) until one has measured it.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from millstream_runtime.distributed.topology import Topology

MOST_BYTES = 256 << 10  # of a sum: each rank reads those of all others. Where NCCL becomes quicker is not measured.
ALIGNED_BYTES = 16
DTYPES = {torch.float32, torch.bfloat16}  # that torch's kernel takes
SWITCH = "MILLSTREAM_SYMMETRIC_MEMORY"  # 1: use it, 0: do not; absent: where it was measured
MEASURED_CAPABILITIES: frozenset[int] = frozenset()
BACKEND = "symmetric memory"


class Summing(Protocol):
    """Sums some tensors over all ranks."""

    def takes(self, partial: Tensor) -> bool:
        """Whether it sums this one. Only what is the same on every rank decides."""

    def all_reduce(self, partial: Tensor) -> None:
        """Sum in place. All ranks call this together."""


def reason_against(topology: Topology, device: torch.device) -> str | None:
    """Why the ranks cannot sum by symmetric memory; None: they can."""
    asked = os.environ.get(SWITCH)
    if device.type != "cuda":
        return "the ranks compute on a CPU"
    if asked == "0":
        return f"{SWITCH} is 0"
    if not topology.peer_access:
        return "a GPU cannot read another's memory"
    if topology.link != "NVLink":
        return f"NVLink does not join all GPUs: {topology.link}"
    if not has_operation():
        return "this torch has no such sum"
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    if asked != "1" and capability not in MEASURED_CAPABILITIES:
        return f"it was not measured on sm_{capability} yet; {SWITCH}=1 uses it"
    return None


def has_operation() -> bool:
    """Whether torch has the operation; its module is not public."""
    return hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out")


class SymmetricSum:
    """See `Summing`. One buffer for all sums: torch's kernel returns when every rank has read it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """All ranks make one together."""
        from torch.distributed import _symmetric_memory

        self._group_name = group.group_name
        self._buffer = _symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self._buffer, self._group_name)

    def takes(self, partial: Tensor) -> bool:
        size = partial.element_size()
        return (
            partial.dtype in DTYPES
            and 0 < partial.numel() * size <= MOST_BYTES
            and partial.is_contiguous()
            and not partial.numel() * size % ALIGNED_BYTES
            and not partial.storage_offset() * size % ALIGNED_BYTES
        )

    def all_reduce(self, partial: Tensor) -> None:
        buffer = self._buffer.view(partial.dtype)[: partial.numel()].view(partial.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, partial, "sum", self._group_name, partial)


def sums_rightly(summing: Summing, rank: int, size: int, device: torch.device) -> bool:
    """Whether a sum of whole numbers is what it must be. All ranks call this together."""
    found = torch.arange(64, dtype=torch.float32, device=device) * (rank + 1)
    expected = torch.arange(64, dtype=torch.float32, device=device) * (size * (size + 1) // 2)
    summing.all_reduce(found)
    return torch.equal(found, expected)
