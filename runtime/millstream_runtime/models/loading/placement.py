"""How a tensor that was read gets onto the device, and when its numbers are checked."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from millstream_runtime.models.loading.checkpoint import check_finite


class Placement(Protocol):
    """Use as a context manager: what it holds is given back at its end."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def place(self, name: str, source: Tensor) -> Tensor:
        """Return `source`, which may be a mapped file, on the device. `name`: for messages.

        Raises:
            RuntimeFailure: CheckpointInvalid, this tensor or one before it holds numbers that are not finite.
        """

    def finish(self) -> None:
        """Check what is not checked yet. Raises RuntimeFailure as `place` does."""


class CheckedOnHost:
    """Checks each tensor on the host, then copies it and waits for the copy. On a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def place(self, name: str, source: Tensor) -> Tensor:
        check_finite(name, source)
        return source.to(self._device)

    def finish(self) -> None:
        return
