"""Collectives between ranks: a process group of torch, NCCL on GPUs and gloo on CPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from millstream_runtime.errors import FailureReason, RuntimeFailure

LOOPBACK = "lo"
# NCCL's own watchdog ends the process without a reason. It comes after the leader's deadline, which gives one.
NCCL_WATCHDOG_FACTOR = 5


def join(rank: int, size: int, device: torch.device, rendezvous: Path, timeout_seconds: float) -> DistributedRanks:
    """Join the process group; every rank calls this.

    All are in one pod, so they talk over the loopback device: nothing is open to the network. NCCL says what is wrong
    (`NCCL_DEBUG=WARN`) unless the environment asks for another level.

    Raises:
        RuntimeFailure: NCCLFailed.
    """
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    if Path("/sys/class/net", LOOPBACK).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    on_cuda = device.type == "cuda"
    with collective_errors():
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=dist.FileStore(str(rendezvous), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds * (NCCL_WATCHDOG_FACTOR if on_cuda else 1)),
            device_id=device if on_cuda else None,
        )
    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - init_process_group has made it
    return DistributedRanks(group)


class DistributedRanks:
    """`tensor_parallel.Ranks` over a process group of torch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._is_alone = False
        self.rank, self.size = group.rank(), group.size()
        self.backend: str = dist.get_backend(group)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self._is_alone:
            return partial
        with collective_errors():
            dist.all_reduce(partial, group=self._group)
        return partial

    def gather(self, part: Tensor) -> list[Tensor]:
        if self._is_alone:
            return [part] * self.size if self.rank == 0 else []
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        with collective_errors():
            dist.gather(part.contiguous(), parts or None, dst=0, group=self._group)
        return parts

    def broadcast(self, tensor: Tensor) -> None:
        if self._is_alone:
            return
        with collective_errors():
            dist.broadcast(tensor, src=0, group=self._group)

    def abort(self) -> None:
        """Wake threads that wait for a lost rank. gloo needs no help: its connections are closed."""
        if self.backend == "nccl":
            with contextlib.suppress(RuntimeError):
                self._group.abort()

    def leave(self, *, after_a_loss: bool = False) -> None:
        """Leave the process group. After a loss this does nothing with NCCL, which would wait for the lost rank."""
        if after_a_loss and self.backend == "nccl":
            return
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group(self._group)


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Turn torch's errors about other ranks into a RuntimeFailure with their first line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeFailure(FailureReason.NCCL_FAILED, f"The ranks lost each other: {said[:500]}.") from error
