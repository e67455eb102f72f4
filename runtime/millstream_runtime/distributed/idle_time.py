"""How long a process has computed nothing, by the kernel's count of its processor time.

For a process that may work for as long as it likes and says nothing meanwhile, such as a rank that loads its share of
a model. One that is stopped, or waits for a disk that does not answer, gets no processor time.
"""

from __future__ import annotations

from pathlib import Path

# Of `/proc/PID/stat` behind the name: utime, stime, and those of the children it has waited for (proc(5)), in ticks.
_TIMES = slice(11, 15)


class IdleTime:
    """Idle seconds of one process, counted in looks: a machine that slept in between adds one look, not its sleep."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._last = self._processor_ticks()
        self._seconds = 0.0

    def look(self, elapsed_seconds: float) -> float:
        """Return the idle seconds, now that `elapsed_seconds` have passed since the last look.

        Always 0 where the kernel does not count (no `/proc`), or no longer (the process has ended).
        """
        ticks = self._processor_ticks()
        self._seconds = self._seconds + elapsed_seconds if ticks is not None and ticks == self._last else 0.0
        self._last = ticks
        return self._seconds

    def _processor_ticks(self) -> int | None:
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return sum(int(ticks) for ticks in fields[_TIMES])
