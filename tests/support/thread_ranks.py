"""Tensor-parallel ranks as threads of one process: the arithmetic of shares at any size, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from millstream_runtime.models.linear.tensor_parallel import Ranks


class _Meeting:
    """Where all threads of a group put down their tensors and look at everybody's."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self._places: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, given: Tensor) -> list[Tensor]:
        self._places[rank] = given.clone()
        self.barrier.wait()
        everybody = list(self._places)
        self.barrier.wait()  # no rank writes the next value before all have read
        return everybody


class ThreadRanks:
    """A fake of `Ranks`: what the processes of a group exchange, by a list in memory."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, size

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.copy_(torch.stack(self._meeting.exchange(self.rank, partial)).sum(dim=0))

    def gather(self, part: Tensor) -> list[Tensor]:
        everybody = self._meeting.exchange(self.rank, part)
        return everybody if self.rank == 0 else []

    def alone(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._meeting.exchange(self.rank, tensor)[0])


def on_ranks(size: int, work: Callable[[Ranks], Tensor]) -> Tensor:
    """Run `work` on every rank at once; the result of rank 0. The first rank that fails ends all."""
    meeting = _Meeting(size)

    def guarded(rank: int) -> Tensor:
        try:
            return work(ThreadRanks(meeting, rank, size))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(guarded, range(size)))
    return results[0]
