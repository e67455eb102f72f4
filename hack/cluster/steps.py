"""Steps on the terminal: what runs now, how long it has been running, and where the time went.

Steps may overlap (a download during a compile), so the table at the end gives each step's own seconds and the wall
time of the whole. On a terminal the last line lives (rewritten every second); elsewhere a line appears every 15 s.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

QUIET_SECONDS = 15.0


def seconds_text(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60:02d} s"


@dataclass
class Finished:
    """One line of the final table."""

    title: str
    seconds: float
    note: str = ""


@dataclass
class Steps:
    """Prints steps as they start and end; thread-safe. `close()` stops the living line."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    finished: list[Finished] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, tuple[str, float]] = {}
        self._serial = 0
        self._began = time.monotonic()
        self._living = self.out.isatty()
        self._closed = threading.Event()
        threading.Thread(target=self._live, name="steps", daemon=True).start()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Time a block. A block that raises is printed as failed and not counted as finished."""
        began = time.monotonic()
        with self._lock:
            self._serial += 1
            serial = self._serial
            self._running[serial] = (title, began)
            if not self._living:
                self._print(f"  … {title}")
        ended_well = False
        try:
            yield
            ended_well = True
        finally:
            seconds = time.monotonic() - began
            with self._lock:
                del self._running[serial]
                mark = "✓" if ended_well else "✗"
                self._print(f"  {mark} {title}  {seconds_text(seconds)}")
                if ended_well:
                    self.finished.append(Finished(title, seconds))

    def say(self, text: str) -> None:
        """A line that is not a step (a fact, a decision, a warning)."""
        with self._lock:
            self._print(f"  · {text}")

    def table(self) -> str:
        """Where the time went: steps of at least 0.1 s, slowest first, and the wall time."""
        rows = sorted((step for step in self.finished if step.seconds >= 0.1), key=lambda step: -step.seconds)
        width = max((len(step.title) for step in rows), default=0)
        lines = [f"  {step.title:<{width}}  {seconds_text(step.seconds):>12}" for step in rows]
        wall = seconds_text(time.monotonic() - self._began)
        return "\n".join([*lines, f"  {'wall time (steps overlap)':<{width}}  {wall:>12}"])

    def close(self) -> None:
        """Stop the living line; what was printed stays."""
        self._closed.set()
        with self._lock:
            self._print("")

    def _print(self, line: str) -> None:
        if self._living:
            self.out.write("\r\x1b[2K")
        if line:
            self.out.write(line + "\n")
        self.out.flush()

    def _live(self) -> None:
        spoken: dict[int, float] = {}
        while not self._closed.wait(1.0 if self._living else 0.5):
            with self._lock:
                if self._closed.is_set():
                    return
                self._beat(time.monotonic(), spoken)

    def _beat(self, now: float, spoken: dict[int, float]) -> None:
        if self._living:
            if self._running:
                parts = [f"{title} {seconds_text(now - began)}" for title, began in self._running.values()]
                self.out.write("\r\x1b[2K  … " + " · ".join(parts)[:150])
                self.out.flush()
            return
        for serial, (title, began) in self._running.items():
            if now - spoken.get(serial, began) >= QUIET_SECONDS:
                spoken[serial] = now
                self._print(f"    still {title} ({seconds_text(now - began)})")
