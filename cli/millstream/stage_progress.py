"""Progress of a command that works in stages, on stderr: what is done, and the time that is left."""

from __future__ import annotations

import sys
import time

LOG_SECONDS = 30.0  # between lines of progress where stderr is no terminal
COUNTED = ("layers",)  # stages that show numbers; the others show a percentage


class StageProgress:
    """One line on a terminal, with the time that is left; elsewhere a line every LOG_SECONDS."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._stage = ""
        self._first = (0.0, 0.0)  # time and share when the stage began
        self._logged = float("-inf")

    def __call__(self, stage: str, done: float, total: float) -> None:
        """`done` of `total` of a stage; it may begin anywhere, after an interruption."""
        now, share = time.monotonic(), done / max(total, 1e-9)
        if stage != self._stage:
            self._stage, self._first = stage, (now, share)
        began, first = self._first
        words = f"{stage}: {done:.1f} of {total:g}" if stage in COUNTED else f"{stage}: {100 * share:.0f} %"
        if share > first:
            words += f", {_duration((now - began) / (share - first) * (1 - share))} left"
        if self._live:
            print(f"\r\x1b[2K{words}", end="", file=sys.stderr, flush=True)
        elif now - self._logged >= LOG_SECONDS:
            self._logged = now
            print(words, file=sys.stderr, flush=True)

    def say(self, sentence: str) -> None:
        """Show a sentence above the line."""
        self.close()
        print(sentence, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line."""
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
