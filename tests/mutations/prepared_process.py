"""A process that has imported what other projects wrote, and forks for each run of pytest.

Importing torch, transformers and HTTP libraries takes several times as long as most tests that notice a mutation. The
project's own modules are what mutations change: the forked process imports them.

    runner ── arguments of pytest, where its output goes ──▶ prepared process ── fork ──▶ pytest in the working copy
           ◀── exit status, negative for a signal ──────────
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.working_copy import WorkingCopy

IMPORTED = (
    "pytest",
    "hypothesis",
    "openai",
    "torch",
    "transformers.models.llama",
    "fastapi",
    "uvicorn",
    "aiohttp",
    "kopf",
)


class PreparedProcess:
    """Runs pytest in `copy`, one run at a time."""

    def __init__(self, copy: WorkingCopy, imported: Sequence[str] = IMPORTED) -> None:
        """`imported`: modules that it imports before the first run."""
        self.copy, self._imported = copy, imported
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], output: Path, timeout_seconds: float) -> int:
        """Return the exit status of pytest, negative for a signal. `output`: where it writes.

        Raises:
            subprocess.TimeoutExpired: it did not end in time, and was killed.
        """
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the prepared process has no pipes")
        process.stdin.write(json.dumps({"arguments": [*arguments], "output": str(output)}) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], timeout_seconds)[0]:
            self.close()
            raise subprocess.TimeoutExpired(["pytest", *arguments], timeout_seconds)
        answer = process.stdout.readline()
        if not answer:
            self.close()
            raise RuntimeError("the prepared process ended before pytest did")
        return int(answer)

    def close(self) -> None:
        """End the process and what it forked."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutations.prepared_process", *self._imported],
                cwd=self.copy.folder,
                env=self.copy.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # so that it can be killed with all that it starts
            )
        return self._process


def serve(imported: Sequence[str]) -> None:
    """Answer each line of standard input with an exit status, until there are no more."""
    for name in imported:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        print(_status_of_fork(request["arguments"], request["output"]), flush=True)


def _status_of_fork(arguments: list[str], output: str) -> int:
    child = os.fork()
    if child == 0:
        _run_pytest(arguments, output)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _run_pytest(arguments: list[str], output: str) -> None:
    """Does not return."""
    status = 3  # pytest's own for an internal error
    try:
        import pytest

        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(written, 1)
        os.dup2(written, 2)
        status = int(pytest.main(arguments))
    except BaseException:  # this process must not go on as the one that was forked
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1:])
