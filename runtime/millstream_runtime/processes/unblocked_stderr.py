"""A standard error that never makes its writer wait: a full pipe that is not read takes nothing more, and a write to it
would hold the event loop, and with it every probe and every stream, until it is read.

`poll` says that a pipe takes PIPE_BUF bytes at once, so pieces of that size never block. What is not taken is dropped
and counted. So is what cannot be written: the pipe has no reader, the disk is full.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TextIO


class UnblockedFile(io.RawIOBase):
    """Writes to a file descriptor, which it does not close.

    Attributes:
        dropped_writes: those of which a part was dropped.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped_writes = 0
        self._descriptor = descriptor
        self._is_mid_line = False

    def takes_more(self) -> bool:
        """Whether a write does not wait; it may still fail."""
        asked = select.poll()  # not kept: two threads may not use one at the same time
        asked.register(self._descriptor, select.POLLOUT)
        return bool(asked.poll(0))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Write what fits; returns the length of all, or a buffered caller would try the rest again."""
        rest = memoryview(b"\n" + bytes(data) if self._is_mid_line else data)
        try:
            while rest and self.takes_more():
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]
                self._is_mid_line = bool(rest)
        except OSError:  # no reader, a full disk
            pass
        self.dropped_writes += bool(rest)
        return len(data)


def unblocked(stream: TextIO) -> TextIO:
    """Return a stream to the same descriptor that never waits; `stream` itself where it has none."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        raw = UnblockedFile(stream.fileno())
    except (OSError, ValueError):
        return stream
    stream.flush()
    # A raw file in the place of a buffered one: a buffer would keep what could not be written, and fail later.
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)  # type: ignore[type-var]


def unblock_standard_error() -> None:
    """Replace `sys.stderr`; called before anything else takes it over."""
    sys.stderr = unblocked(sys.stderr)


def take_dropped_writes(stream: object) -> int:
    """The writes that `stream` has dropped since the last call, once it takes some again; else 0."""
    raw = getattr(stream, "buffer", None)
    if not isinstance(raw, UnblockedFile) or not raw.dropped_writes or not raw.takes_more():
        return 0
    count, raw.dropped_writes = raw.dropped_writes, 0
    return count
