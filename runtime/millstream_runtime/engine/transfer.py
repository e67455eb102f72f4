"""Small numbers between host and device, without waiting for what the device does meanwhile.

A plain `torch.tensor(values, device="cuda")` copies from pageable memory and so waits until the device has finished
all it was asked before. From pinned memory the copy is one more entry in its queue; torch keeps the pinned memory until
the copy is done, so that a caller may forget it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from millstream_runtime.engine.device_events import Mark


def on_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`values` as a tensor on `device`; int64 or float32 where no `dtype` is given."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def staging(num_elements: int, device: torch.device) -> Tensor:
    """`[num_elements]` int64 on the host, not set, to be filled there and copied to `device` with `non_blocking`."""
    return torch.empty(num_elements, dtype=torch.int64, pin_memory=device.type == "cuda")


class ReadBack:
    """Numbers on their way to the host: the copy is enqueued now, and `tolist` waits for it alone, not for what was
    enqueued behind it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self._copied = Mark(tensor.device)

    def tolist(self) -> list[Any]:
        """The numbers; a list of lists where there are two dimensions."""
        self._copied.wait()
        values: list[Any] = self._host.tolist()
        return values
