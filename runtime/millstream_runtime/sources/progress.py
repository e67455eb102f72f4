"""Progress of a download: one line every few seconds for a person.

12.3 of 40.1 GB (31 %), 412 MB/s, 1 min 7 s left
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

INTERVAL_SECONDS = 5.0


class DownloadProgress:
    """Sum of the bytes of several threads. `say` receives lines without a newline."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self.say = say
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._expected_bytes = 0
        self._kept_bytes = 0
        self._downloaded_bytes = 0
        self._reported_at = clock()
        self._reported_bytes = 0

    @property
    def downloaded_bytes(self) -> int:
        """Bytes that came over the network, including discarded ones."""
        return self._downloaded_bytes

    @property
    def done_bytes(self) -> int:
        """Bytes that are on disk, from an earlier run or from this one."""
        return max(0, self._kept_bytes + self._downloaded_bytes)

    @property
    def expected_bytes(self) -> int:
        """Bytes of the files whose size is known so far."""
        return self._expected_bytes

    def expect(self, size_bytes: int) -> None:
        """Add bytes to download."""
        with self._lock:
            self._expected_bytes += size_bytes

    def keep(self, size_bytes: int) -> None:
        """Count bytes that are on disk from an earlier run."""
        with self._lock:
            self._kept_bytes += size_bytes

    def discard(self, size_bytes: int) -> None:
        """Uncount bytes that must be downloaded again."""
        with self._lock:
            self._kept_bytes -= size_bytes

    def add(self, size_bytes: int) -> None:
        """Count bytes that arrived."""
        with self._lock:
            self._downloaded_bytes += size_bytes
            now = self._clock()
            elapsed_seconds = now - self._reported_at
            if elapsed_seconds < self._interval_seconds:
                return
            rate = (self._downloaded_bytes - self._reported_bytes) / elapsed_seconds
            self._reported_at, self._reported_bytes = now, self._downloaded_bytes
            line = describe(self._kept_bytes + self._downloaded_bytes, self._expected_bytes, rate)
        self.say(line)


def describe(done_bytes: int, expected_bytes: int, bytes_per_second: float) -> str:
    """The line for a person."""
    percent = 100 * done_bytes // max(1, expected_bytes)
    line = f"{done_bytes / 1e9:.2f} of {expected_bytes / 1e9:.2f} GB ({percent} %), {bytes_per_second / 1e6:.1f} MB/s"
    if bytes_per_second <= 0:
        return line
    return f"{line}, {words_for_seconds((expected_bytes - done_bytes) / bytes_per_second)} left"


def words_for_seconds(seconds: float) -> str:
    """`47 s`, `1 min 7 s`, `2 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
