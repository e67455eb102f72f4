"""What connects the ranks of a pod, as found at start (`probe`). Plain data: the HTTP server and its metrics read it.

A pair of GPUs that should talk over NVLink and does not (a node wired otherwise, peer access switched off by a
hypervisor, a container without shared memory) computes the same tokens at a fraction of the speed, and nothing else
would say so. The finding is in the log, in `/ready` and in `/metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of one pod and the way between them."""

    world_size: int
    backend: str  # nccl or gloo
    device_count: int  # CUDA devices that the pod sees; 0 on a CPU
    link: str  # NVLink, PCIe or Memory; Unknown where the driver does not say
    peer_access: bool | None  # whether every GPU may read every other's memory; None on a CPU
    # What 2 (n - 1) / n of the bytes of a large all-reduce take: to be compared with a link's speed, whatever n is.
    allreduce_bytes_per_second: float
    allreduce_latency_seconds: float  # of a small one
    small_sums: str = ""  # what adds the few numbers of a decode over the ranks
    small_sums_reason: str = ""
