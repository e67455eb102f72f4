"""Tensors from mapped files to a GPU through a ring of pinned buffers.

    file, mapped ── threads ──▶ pinned buffer 0 ── side stream ──▶ tensor on the device ──▶ finite? (on the device)
                                pinned buffer 1
                                ...                buffers are used again when their copy is done

Threads read from the disk, or the page cache, while earlier pieces cross the bus and the device puts earlier tensors in
their places; the host waits for a buffer alone. A copy from a mapped file itself would go through one thread and wait
each time. Host memory is that of the ring, however large a tensor is.

Whether numbers are finite is found on the device and read back for many tensors at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from millstream_runtime.models.loading.checkpoint import bad_numbers, invalid_numbers
from millstream_runtime.models.loading.placement import CheckedOnHost, Placement

BUFFER_BYTES, NUM_BUFFERS = 16 << 20, 8
MOST_THREADS = 8
MOST_UNCHECKED = 256  # tensors whose check is on the device; each read-back waits for all work so far


class Copies(Protocol):
    """Copies from buffers on the host to a device that run behind the host's back, one after another."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Memory on the host that can be copied from so, uint8 `[num_bytes]`."""

    def begin(self) -> None:
        """The copies that follow write into memory that may be in use by what the device was asked before."""

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Enqueue a copy, both uint8 `[n]`; what is returned waits until `source` may be overwritten."""

    def join(self) -> None:
        """What the device is asked from now on comes after all copies."""


class CudaCopies:
    """On a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        wait: Callable[[], None] = event.synchronize
        return wait

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _Filling(NamedTuple):
    """A piece that a thread copies into a buffer. `target`: where it goes on the device."""

    buffer: Tensor
    target: Tensor
    done: Future[None]


class _Crossing(NamedTuple):
    """A buffer that is copied to the device."""

    buffer: Tensor
    wait: Callable[[], None]


class StagedPlacement:
    """See the module. One thread uses it."""

    def __init__(
        self,
        device: torch.device,
        copies: Copies,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        """`buffer_bytes` times `num_buffers` is what it takes on the host."""
        self._device, self._copies, self._buffer_bytes = device, copies, buffer_bytes
        self._free = [copies.buffer(buffer_bytes) for _ in range(num_buffers)]
        self._filling: deque[_Filling] = deque()
        self._crossing: deque[_Crossing] = deque()
        self._threads = ThreadPoolExecutor(min(num_buffers, MOST_THREADS), thread_name_prefix="weights")
        self._unchecked: list[tuple[str, torch.dtype, Tensor]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()
        while self._crossing:  # pinned memory must outlive its copies
            self._crossing.popleft().wait()
        self._free.clear()

    def place(self, name: str, source: Tensor) -> Tensor:
        """See `Placement`. The tensor is on its way: what the device is asked from now on finds it there."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        self._copies.begin()
        for target_piece, piece in zip(self._pieces(target), self._pieces(source.contiguous()), strict=True):
            buffer = self._buffer()
            done = self._threads.submit(np.copyto, buffer[: len(piece)].numpy(), piece.numpy())
            self._filling.append(_Filling(buffer, target_piece, done))
        while self._filling:
            self._cross()
        self._copies.join()
        flag = bad_numbers(target)
        if flag is not None:
            self._unchecked.append((name, source.dtype, flag))
        if len(self._unchecked) >= MOST_UNCHECKED:
            self.finish()
        return target

    def finish(self) -> None:
        """See `Placement`. Waits for the device."""
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return
        flags = torch.stack([flag for _, _, flag in unchecked]).tolist()
        for (name, dtype, _), is_bad in zip(unchecked, flags, strict=True):
            if is_bad:
                raise invalid_numbers(name, dtype)

    def _pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        """The bytes of a contiguous tensor, as views that fit into a buffer."""
        if not tensor.numel():
            return
        flat = tensor.view(-1).view(torch.uint8)
        for first in range(0, len(flat), self._buffer_bytes):
            yield flat[first : first + self._buffer_bytes]

    def _buffer(self) -> Tensor:
        """A buffer that nothing reads or writes. The oldest is waited for where none is free."""
        while self._filling and self._filling[0].done.done():
            self._cross()
        if not self._free and not self._crossing:
            self._cross()
        if not self._free:
            crossing = self._crossing.popleft()
            crossing.wait()
            self._free.append(crossing.buffer)
        return self._free.pop()

    def _cross(self) -> None:
        """Enqueue the copy to the device of the piece that was read first."""
        piece = self._filling.popleft()
        piece.done.result()
        filled = piece.buffer[: len(piece.target)]
        self._crossing.append(_Crossing(piece.buffer, self._copies.copy(piece.target, filled)))


def placement_for(device: torch.device) -> Placement:
    """Return a new placement for the tensors of one model."""
    return StagedPlacement(device, CudaCopies(device)) if device.type == "cuda" else CheckedOnHost(device)
