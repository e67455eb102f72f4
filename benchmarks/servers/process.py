"""A server as a process group on loopback: started, waited for, paused while others are measured, and surely ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

BOOT_SECONDS = 900.0
TERMINATE_SECONDS = 20.0
IDLE_WINDOW_SECONDS = 2.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PARENT_FIELD, SESSION_FIELD, USER_FIELD, SYSTEM_FIELD = 1, 3, 11, 12  # of /proc/PID/stat, after the command's name


class ServerFailedError(Exception):
    """A server did not start, or ended; `str()` has its last words."""


class ServerProcess:
    """One server and everything that it has started."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start `command`; its output goes to `log`. It dies with this process, however this one ends."""
        guard = [found, "--pdeathsig", "KILL"] if (found := shutil.which("setpriv")) else []
        self._log = log
        self._began = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def wait_until_ready(self, answers: Callable[[], bool], timeout_seconds: float = BOOT_SECONDS) -> float:
        """Seconds from the start until `answers()`.

        Raises:
            ServerFailedError: it ended, or `timeout_seconds` passed.
        """
        while not answers():
            if self._process.poll() is not None:
                raise ServerFailedError(f"ended with status {self._process.returncode}: {self.last_words()}")
            if time.monotonic() - self._began > timeout_seconds:
                raise ServerFailedError(f"did not answer within {timeout_seconds:.0f} s: {self.last_words()}")
            time.sleep(0.25)
        return time.monotonic() - self._began

    def idle_cpu_share(self, seconds: float = IDLE_WINDOW_SECONDS) -> float:
        """Cores that the server uses while nobody asks it anything."""
        before, began = self._cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return max(0.0, self._cpu_seconds() - before) / (time.monotonic() - began)

    def memory_bytes(self) -> int:
        """What its processes hold: proportional set sizes, so that a page that two of them share counts once."""
        return sum(map(_proportional_bytes, self._members()))

    def pause(self) -> None:
        """Stop all of its processes."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM, and SIGKILL for what is left of it after a while."""
        members = self._members()
        self.resume()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_SECONDS
        while time.monotonic() < deadline and any(map(_is_running, members)):
            self._process.poll()
            time.sleep(0.1)
        for pid in {*members, *self._members()}:
            _kill(pid, signal.SIGKILL)
        self._process.wait()

    def last_words(self, most_characters: int = 400) -> str:
        """The end of its output, in one line; an exception's own line where there is one."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\w(Error|Exception): |^error:", line)]
        return " | ".join(errors[-2:] or lines[-3:])[-most_characters:] or "it printed nothing"

    def _members(self) -> set[int]:
        """Processes of its session, and descendants that left it."""
        parents, found = {}, set()
        for folder in Path("/proc").glob("[0-9]*"):
            if fields := _stat(int(folder.name)):
                parents[int(folder.name)] = int(fields[PARENT_FIELD])
                if int(fields[SESSION_FIELD]) == self._process.pid:
                    found.add(int(folder.name))
        found.add(self._process.pid)
        while grown := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= grown
        return found

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._members():
            _kill(pid, number)

    def _cpu_seconds(self) -> float:
        stats = filter(None, map(_stat, self._members()))
        return sum(int(one[USER_FIELD]) + int(one[SYSTEM_FIELD]) for one in stats) / CLOCK_TICKS


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended, or it is a zombie
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


def _is_running(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
