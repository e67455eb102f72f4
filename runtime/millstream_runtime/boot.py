"""Boot phases of the runtime, and the time and bytes of each phase.

    Starting -> LoadingWeights -> SizingKVCache -> WarmingUp -> Ready -> Draining
         \\____________\\______________\\____________\\_________\\-> Failed
                                                            Ready <-> Unresponsive

An engine that is restarted after a crash begins again at Starting. An engine that completes no step
(`server.engine.watchdog`) is Unresponsive until it completes one.

`Starting` begins when the kernel created the process, not when this module was imported: the interpreter's start
and the imports are part of what a user waits for. Several threads read and write the ledger, so every access takes a
lock. It imports nothing heavy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Phase(StrEnum):
    """The phases that `/ready` reports; the operator reads these values."""

    STARTING = "Starting"
    LOADING_WEIGHTS = "LoadingWeights"
    SIZING_KV_CACHE = "SizingKVCache"
    WARMING_UP = "WarmingUp"
    READY = "Ready"
    UNRESPONSIVE = "Unresponsive"
    DRAINING = "Draining"
    FAILED = "Failed"


BOOT_PHASES = (Phase.STARTING, Phase.LOADING_WEIGHTS, Phase.SIZING_KV_CACHE, Phase.WARMING_UP)
SERVING_PHASES = (Phase.READY, Phase.UNRESPONSIVE)  # requests may be running


@dataclass(frozen=True, slots=True)
class WeightsProgress:
    """How much of the checkpoint is read; of several ranks, rank 0's share. The bytes are the files', not the device's.

    `seconds`: from the start of reading to this report, which was made at `at_seconds` of the monotonic clock.
    """

    done_bytes: int
    total_bytes: int
    seconds: float
    at_seconds: float

    @property
    def bytes_per_second(self) -> float | None:
        """The mean so far; None before the first byte."""
        return self.done_bytes / self.seconds if self.done_bytes and self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class BootSnapshot:
    """A consistent copy of the ledger. `seconds` has boot phases only; the running one counts up to now.

    `num_bytes`: bytes that a phase read or allocated. `weights`: None before the first is read.
    `last_boot_seconds`: of this process's last completed boot; empty during the first.
    """

    phase: Phase
    message: str
    seconds: Mapping[Phase, float]
    num_bytes: Mapping[Phase, int] = field(default_factory=dict)
    weights: WeightsProgress | None = None
    last_boot_seconds: Mapping[Phase, float] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """Process start to Ready (to now, while booting)."""
        return sum(self.seconds.values())


class BootLedger:
    """Seconds and bytes by phase. Entering a phase closes the one before; re-entering a phase adds to it."""

    def __init__(self, process_age_seconds: float | None = None) -> None:
        age = process_age_seconds if process_age_seconds is not None else measure_process_age_seconds()
        self._lock = threading.Lock()
        self._entered_at = time.monotonic() - age
        self._phase = Phase.STARTING
        self._message = ""
        self._seconds: dict[Phase, float] = {}
        self._num_bytes: dict[Phase, int] = {}
        self._weights: WeightsProgress | None = None
        self._last_boot_seconds: dict[Phase, float] = {}
        self._observers: list[Callable[[BootSnapshot], None]] = []

    def subscribe(self, observer: Callable[[BootSnapshot], None]) -> None:
        """Call `observer` after every change, in the thread that made it; it must be quick and must not raise."""
        self._observers.append(observer)

    def enter(self, phase: str, message: str = "") -> None:
        """Move to `phase`. Failed is final, and a process that drains does not become Ready again."""
        with self._lock:
            if self._phase is Phase.FAILED or (self._phase is Phase.DRAINING and phase != Phase.FAILED):
                return
            now = time.monotonic()
            if self._phase in BOOT_PHASES:
                self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._entered_at
            self._phase, self._message, self._entered_at = Phase(phase), message, now
            if self._phase is Phase.READY:
                self._last_boot_seconds = dict(self._seconds)
        snapshot = self.snapshot()
        for observer in self._observers:
            observer(snapshot)

    def restart(self, message: str) -> None:
        """Begin a new boot for a restarted engine, and clear the figures of the previous one."""
        with self._lock:
            if self._phase in (Phase.FAILED, Phase.DRAINING):
                return
            self._seconds.clear()
            self._num_bytes.clear()
            self._weights = None
            self._phase, self._message, self._entered_at = Phase.STARTING, message, time.monotonic()
        snapshot = self.snapshot()
        for observer in self._observers:
            observer(snapshot)

    def read_weights(self, progress: WeightsProgress) -> None:
        """Record how much of the checkpoint is read. Calls no observers: this comes several times per second."""
        with self._lock:
            self._weights = progress
            self._num_bytes[Phase.LOADING_WEIGHTS] = progress.done_bytes

    def count_bytes(self, phase: Phase, num_bytes: int) -> None:
        """Record the bytes that a phase allocated."""
        with self._lock:
            self._num_bytes[phase] = num_bytes

    @property
    def phase(self) -> Phase:
        """The current phase, without the cost of a snapshot: every request reads it."""
        return self._phase

    def snapshot(self) -> BootSnapshot:
        with self._lock:
            seconds = dict(self._seconds)
            if self._phase in BOOT_PHASES:
                running = time.monotonic() - self._entered_at
                seconds[self._phase] = seconds.get(self._phase, 0.0) + running
            return BootSnapshot(
                self._phase, self._message, seconds, dict(self._num_bytes), self._weights, dict(self._last_boot_seconds)
            )


def measure_process_age_seconds() -> float:
    """Seconds since the kernel started this process; 0.0 where `/proc` does not say.

    Field 22 of /proc/self/stat is the start time in clock ticks since boot (man 5 proc); the fields are counted
    after the last ")" because the command name in field 2 may hold spaces.
    """
    try:
        fields_from_third = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_seconds = int(fields_from_third[19]) / os.sysconf("SC_CLK_TCK")
        uptime_seconds = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime_seconds - started_seconds)
