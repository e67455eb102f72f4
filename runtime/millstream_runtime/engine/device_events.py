"""Events in the queue of a CUDA device: how the host waits for a step, and how long the step took.

    host      launch N          launch N + 1        wait for N
    device    ...... [began N | step N | ended N] [began N + 1 | ...

A launch returns at once, so the host's clock around it says nothing. Between its two events lies a step alone: what the
device did before is behind the first, and waiting for the host to plan is not within. On a CPU a call returns with its
result; there is nothing to wait for, and the host's clock is right.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Mark:
    """A place in the device's queue, behind all that was enqueued so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Return when the device has come here; it may be further."""
        if self._event is not None:
            self._event.synchronize()


class StepSpan(Protocol):
    """The time of a step on its device. It begins when it is made, before the step's first launch."""

    def end(self) -> None:
        """All of the step was launched."""

    def seconds(self) -> float:
        """What the step took; waits for its end."""


class CudaSpan:
    """See `StepSpan`. Of the current stream."""

    def __init__(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._began.record()

    def end(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        self._ended.synchronize()
        milliseconds: float = self._began.elapsed_time(self._ended)
        return milliseconds / 1000
