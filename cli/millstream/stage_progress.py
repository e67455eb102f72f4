"""Progress of a command that works in stages, on stderr: what is done, and the time that is left.

In a pod `/ready` answers with it too, for the operator's status.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from millstream.output_streams import can_redraw, one_row
from millstream_runtime.sources.progress_server import PORT, serve_report

LOG_SECONDS = 30.0  # between lines of progress where stderr is no terminal
COUNTED = ("layers",)  # stages that show numbers; the others show a percentage
PHASE = "Working"


class StageProgress:
    """One line on a terminal, with the time that is left; elsewhere a line every LOG_SECONDS."""

    def __init__(self) -> None:
        self._live = can_redraw(sys.stderr)
        self._stage = ""
        self._first = (0.0, 0.0)  # time and share when the stage began
        self._logged = float("-inf")
        self._report: Mapping[str, object] = {"ready": False, "phase": PHASE}

    def serve_in_a_pod(self) -> None:
        """Answer the operator's questions from now on, at the port at which a runtime would."""
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            serve_report(self.report, PORT)

    def report(self) -> Mapping[str, object]:
        """The body of `/ready`: the stage, what is done of it, and the seconds that are left once they are known."""
        return self._report

    def __call__(self, stage: str, done: float, total: float) -> None:
        """`done` of `total` of a stage; it may begin anywhere, after an interruption."""
        now, share = time.monotonic(), done / max(total, 1e-9)
        if stage != self._stage:
            self._stage, self._first = stage, (now, share)
        began, first = self._first
        words = f"{stage}: {done:.1f} of {total:g}" if stage in COUNTED else f"{stage}: {100 * share:.0f} %"
        report = {"ready": False, "phase": PHASE, "progress": {"stage": stage, "done": done, "total": total}}
        if share > first:
            left_seconds = (now - began) / (share - first) * (1 - share)
            words += f", {_duration(left_seconds)} left"
            report |= {"eta_seconds": round(left_seconds, 1)}
        self._report = report  # a new object each time: another thread reads it
        if self._live:
            print(f"\r\x1b[2K{one_row(words, sys.stderr)}", end="", file=sys.stderr, flush=True)
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
