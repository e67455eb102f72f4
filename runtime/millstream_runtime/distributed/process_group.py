"""Collectives between ranks: a process group of torch, NCCL on GPUs and gloo on CPUs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from millstream_runtime.distributed.symmetric_memory import Summing, SymmetricSum, sums_rightly
from millstream_runtime.errors import FailureReason, RuntimeFailure

LOOPBACK = "lo"
LEAST_SECRET_CHARACTERS = 4  # shorter values are words and numbers that errors have anyway
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
        self._small_sums: Summing | None = None
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
            if self._small_sums is not None and self._small_sums.takes(partial):
                self._small_sums.all_reduce(partial)
            else:
                dist.all_reduce(partial, group=self._group)
        return partial

    def use_for_small_sums(self, device: torch.device, reason_against: str | None) -> str | None:
        """Sum few numbers by symmetric memory from now on, where every rank can and a first sum is right.

        All ranks call this together. `reason_against`: why this rank cannot; None: it can. Returns why they do not;
        None: they do.
        """
        summing: Summing | None = None

        def find_reason() -> str | None:
            return reason_against

        def share_memory() -> str | None:
            nonlocal summing
            try:
                summing = SymmetricSum(self._group, device)
            except RuntimeError as error:
                return f"{type(error).__name__}: {_first_line(error)[:200]}"
            return None

        def add() -> str | None:
            is_right = summing is not None and sums_rightly(summing, self.rank, self.size, device)
            return None if is_right else "its first sum was wrong"

        # All ranks take a step, or none does: whoever went on alone would wait for the others.
        for find_problem in (find_reason, share_memory, add):
            problem = find_problem()
            if not self._all_agree(device, problem is None):
                return problem or "another rank cannot"
        self._small_sums = summing
        return None

    def _all_agree(self, device: torch.device, agrees: bool) -> bool:
        votes = torch.tensor([agrees], dtype=torch.int32, device=device)
        with collective_errors():
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

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
        said = without_values(_first_line(error), os.environ)[:500]
        raise RuntimeFailure(FailureReason.NCCL_FAILED, f"The ranks lost each other: {said}.") from error


def without_values(said: str, environment: Mapping[str, str]) -> str:
    """The words of gloo or NCCL, with `$GLOO_SOCKET_IFNAME` for its value: a variable may come from a Secret."""
    for name, value in environment.items():
        if not name.startswith(("GLOO_", "NCCL_")) or name == "NCCL_DEBUG":
            continue
        parts = {part for part in (value, *re.split("[,:=^]+", value)) if len(part) >= LEAST_SECRET_CHARACTERS}
        for part in sorted(parts, key=len, reverse=True):
            said = said.replace(part, f"${name}")
    return said


def _first_line(error: RuntimeError) -> str:
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
