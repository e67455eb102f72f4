"""Local processes in a folder of their own: started with a log file, waited for by what they answer, ended for good."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
STOP_SECONDS = 10.0
_LIBC = ctypes.CDLL(None)


class DidNotStart(Exception):
    """A process of the control plane is not up. `str()` names its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    _LIBC.prctl(_DIES_WITH_PARENT, signal.SIGKILL)  # a harness that is killed must not leave an API server behind


@dataclass(slots=True)
class Process:
    """One running program."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @staticmethod
    def start(name: str, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> Process:
        """Start it, both outputs appended to `log`. It dies with this process."""
        with log.open("ab") as sink:
            popen = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else None,
                preexec_fn=_die_with_parent,
            )
        return Process(name, popen, log)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.popen.poll()

    async def wait_until(self, holds: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Raises DidNotStart when it ends, or does not answer in time."""
        give_up = asyncio.get_running_loop().time() + seconds
        while not await holds():
            self.check()
            if asyncio.get_running_loop().time() > give_up:
                raise DidNotStart(f"{self.name} is not up after {seconds:.0f} s; {self._last_words()}")
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raises DidNotStart when it has ended."""
        if self.exit_code is not None:
            raise DidNotStart(f"{self.name} ended with exit code {self.exit_code}; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{self.log} ends: {lines[-3:]}"

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as the kernel does it: no chance to clean up."""
        self.signal(signal.SIGKILL)

    async def stop(self) -> int:
        """SIGTERM, then SIGKILL. The exit code."""
        self.signal(signal.SIGTERM)
        give_up = asyncio.get_running_loop().time() + STOP_SECONDS
        while self.popen.poll() is None:
            if asyncio.get_running_loop().time() > give_up:
                self.kill()
            await asyncio.sleep(0.05)
        return self.popen.returncode

    def memory_bytes(self) -> tuple[int, int]:
        """Resident memory now, and the most it ever was."""
        fields = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines()
            if ":" in line
        )
        return tuple(int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def cpu_seconds(self) -> float:
        """Processor time used so far, user and system."""
        words = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
