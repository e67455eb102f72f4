"""What a booting engine says of itself, as events: its phases, and how much of the weights is read.

on_phase("LoadingWeights", "Reading …")       ─► PhaseEntered
on_phase.weights_read(done, total)  a tensor  ─► WeightsRead, at most a few a second
"""

from __future__ import annotations

import time
from collections.abc import Callable

from millstream_runtime.boot import WeightsProgress
from millstream_runtime.engine_process.messages import Event, PhaseEntered, WeightsRead

TELL_EVERY_SECONDS = 0.25  # a checkpoint may have ten thousand tensors


class BootEvents:
    """For the thread that boots the engine. It is called for a phase, so a plain function may stand in for it."""

    def __init__(self, send: Callable[[Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._began_at_seconds: float | None = None
        self._told_at_seconds = 0.0

    def __call__(self, phase: str, message: str) -> None:
        """The boot entered `phase`, a word of `boot.Phase`."""
        self._send(PhaseEntered(phase, message))

    def weights_read(self, done_bytes: int, total_bytes: int) -> None:
        """Of the checkpoint. The first call begins the clock; it and the last are always told."""
        now = self._clock()
        is_first = self._began_at_seconds is None
        if self._began_at_seconds is None:
            self._began_at_seconds = now
        if is_first or done_bytes >= total_bytes or now - self._told_at_seconds >= TELL_EVERY_SECONDS:
            self._told_at_seconds = now
            self._send(WeightsRead(WeightsProgress(done_bytes, total_bytes, now - self._began_at_seconds, now)))
