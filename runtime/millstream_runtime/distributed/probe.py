"""Finds out what connects the ranks: asks the driver, and measures collectives among all of them once."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from millstream_runtime.distributed import nvlink, symmetric_memory
from millstream_runtime.distributed.process_group import DistributedRanks
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.models.linear.tensor_parallel import Ranks

LATENCY_BYTES, LATENCY_ROUNDS = 8 << 10, 10  # one decode's row of a large model
BANDWIDTH_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
BANDWIDTH_ROUNDS = {"cpu": 3, "cuda": 10}


def find_topology(ranks: Ranks, device: torch.device) -> Topology:
    """Return the topology. All ranks call this at the same time, because the measurements are collectives."""
    latency_seconds = measure_allreduce(ranks, device, LATENCY_BYTES, LATENCY_ROUNDS)
    kind = "cuda" if device.type == "cuda" else "cpu"
    num_bytes = BANDWIDTH_BYTES[kind]
    seconds = measure_allreduce(ranks, device, num_bytes, BANDWIDTH_ROUNDS[kind])
    moved_bytes = num_bytes * 2 * (ranks.size - 1) / ranks.size
    link, peer_access, device_count = _links(ranks.size) if kind == "cuda" else ("Memory", None, 0)
    return Topology(
        world_size=ranks.size,
        backend=str(getattr(ranks, "backend", "none")),
        device_count=device_count,
        link=link,
        peer_access=peer_access,
        allreduce_bytes_per_second=moved_bytes / seconds,
        allreduce_latency_seconds=latency_seconds,
    )


def choose_small_sums(ranks: DistributedRanks, device: torch.device, topology: Topology) -> Topology:
    """Let the ranks sum few numbers by symmetric memory where they can; the topology says whether, and why. All ranks
    call this at the same time."""
    reason = ranks.use_for_small_sums(device, symmetric_memory.reason_against(topology, device))
    if reason is None:
        return replace(topology, small_sums=symmetric_memory.BACKEND, small_sums_reason="NVLink joins all GPUs")
    return replace(topology, small_sums=ranks.backend, small_sums_reason=reason)


def measure_allreduce(ranks: Ranks, device: torch.device, num_bytes: int, rounds: int) -> float:
    """Return the seconds of one all-reduce of that size: the best of `rounds` after one that is not counted."""
    values = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        ranks.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _links(size: int) -> tuple[str, bool, int]:
    """Link, peer access and number of CUDA devices, of the first `size`: one per rank."""
    pairs = [(one, other) for one in range(size) for other in range(size) if one != other]
    peer_access = all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(size)]
    joined = nvlink.all_joined(uuids)
    link = "Unknown" if joined is None else "NVLink" if joined else "PCIe"
    return link, peer_access, torch.cuda.device_count()
