"""A progress line on a terminal while a load runs; no output where stderr is not a terminal."""

from __future__ import annotations

import time
from typing import TextIO

from millstream.bench.measure import RequestRecord
from millstream.output_streams import can_redraw, one_row

WIDTH = 30
CLEAR_LINE = "\r\x1b[2K"


class LoadProgress:
    """Counts requests; `draw` shows them."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._live = can_redraw(out)
        self._began_at_seconds = time.monotonic()
        self._running = self._done = self._failed = self._tokens = 0

    def began(self) -> None:
        self._running += 1

    def ended(self, record: RequestRecord) -> None:
        self._running -= 1
        self._done += 1
        self._failed += record.error is not None
        self._tokens += record.completion_tokens

    def draw(self) -> None:
        if self._live:
            self._out.write(CLEAR_LINE + one_row(self.line(time.monotonic() - self._began_at_seconds), self._out))
            self._out.flush()

    def line(self, seconds: float) -> str:
        """`[██████░░░░] 12/40  8 running  51 tok/s  0:17`."""
        filled = WIDTH * self._done // self._total
        clock = f"{int(seconds) // 60}:{int(seconds) % 60:02}"
        failed = f"  {self._failed} failed" if self._failed else ""
        rate = self._tokens / seconds if seconds > 0 else 0.0
        bar = "█" * filled + "░" * (WIDTH - filled)
        return f"[{bar}] {self._done}/{self._total}  {self._running} running{failed}  {rate:.0f} tok/s  {clock}"

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._live:
            self._out.write(CLEAR_LINE)
            self._out.flush()
