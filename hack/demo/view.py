"""Lines that are redrawn in place on a terminal, and printed once per change in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

_UP_AND_CLEAR = "\x1b[1A\x1b[2K"


class LiveOutput:
    """The live part of the output. A context manager, so that an interrupt leaves a clean terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._began = time.monotonic()
        self._shown: tuple[str, ...] = ()
        self._height = 0

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines instead of the last ones."""
        seconds = time.monotonic() - self._began
        if self._live:
            self._clear()
            width = shutil.get_terminal_size().columns
            drawn = [f"  {seconds:4.0f} s  {lines[0]}", *(f"          {line}" for line in lines[1:])]
            self._out.write("".join(f"{line[: width - 1]}\n" for line in drawn))
            self._height = len(drawn)
        else:
            fresh = [line for line in lines if line not in self._shown]
            self._out.write("".join(f"  {seconds:4.0f} s  {line}\n" for line in fresh))
        self._shown = tuple(lines)
        self._out.flush()

    def _clear(self) -> None:
        self._out.write(_UP_AND_CLEAR * self._height)
        self._height = 0

    def __enter__(self) -> LiveOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._clear()
            if self._shown:
                self._out.write(f"  {self._shown[0]}\n")
            self._out.flush()
