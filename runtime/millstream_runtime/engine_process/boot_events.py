"""Progress of a booting engine as events: its phases, and how much of the weights is read.

on_phase("LoadingWeights", "Reading …")       ─► PhaseEntered
on_phase.weights_read(done, total)  per tensor  ─► WeightsRead, at most a few per second
"""

from __future__ import annotations

import time
from collections.abc import Callable

from millstream_runtime.boot import WeightsProgress
from millstream_runtime.engine_process.messages import Event, PhaseEntered, WeightsRead

REPORT_INTERVAL_SECONDS = 0.25  # a checkpoint may have ten thousand tensors


class BootEvents:
    """Used by the thread that boots the engine. Calling it enters a phase, so a plain function can replace it."""

    def __init__(self, send: Callable[[Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._began_at_seconds: float | None = None
        self._reported_at_seconds = 0.0

    def __call__(self, phase: str, message: str) -> None:
        """The boot entered `phase`, a value of `boot.Phase`."""
        self._send(PhaseEntered(phase, message))

    def weights_read(self, done_bytes: int, total_bytes: int) -> None:
        """Report bytes of the checkpoint. The first call starts the clock; the first and the last are always sent."""
        now = self._clock()
        is_first = self._began_at_seconds is None
        if self._began_at_seconds is None:
            self._began_at_seconds = now
        if is_first or done_bytes >= total_bytes or now - self._reported_at_seconds >= REPORT_INTERVAL_SECONDS:
            self._reported_at_seconds = now
            self._send(WeightsRead(WeightsProgress(done_bytes, total_bytes, now - self._began_at_seconds, now)))
