"""Running other programs: captured output, one-sentence errors, a log file for what is long."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from hack.cluster import paths
from hack.cluster.errors import ClusterError

_running: set[subprocess.Popen[str]] = set()


def last_words(output: str) -> str:
    """The last line that says something, for an error message; at most 300 characters."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "it said nothing"


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout_seconds: float | None = None,
    log: str | None = None,
) -> str:
    """Run `command` and return its stdout.

    `env` is added to ours. With `log`, stdout and stderr go together into `cache/logs/<log>.log` (returned text is
    empty) and an error names that file. Raises ClusterError when the program is missing, fails or takes too long.
    """
    words = [str(word) for word in command]
    shown = " ".join([Path(words[0]).name, *words[1:4]])
    log_file = paths.subfolder("logs") / f"{log}.log" if log else None
    try:
        result = _spawn(words, log_file, cwd=cwd, env={**os.environ, **(env or {})}, stdin=stdin, limit=timeout_seconds)
    except FileNotFoundError as error:
        raise ClusterError(f"`{words[0]}` is not installed (needed for `{shown} …`).") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{shown} …` did not finish within {timeout_seconds:g} s.") from error
    if result.returncode != 0:
        said = log_file.read_text(errors="replace") if log_file else result.stderr or result.stdout
        where = f" (all of it: {log_file})" if log_file else ""
        raise ClusterError(f"`{shown} …` failed with exit code {result.returncode}: {last_words(said)}{where}")
    return result.stdout or ""


def _spawn(
    words: list[str],
    log_file: Path | None,
    *,
    cwd: Path | None,
    env: dict[str, str],
    stdin: str | None,
    limit: float | None,
) -> subprocess.CompletedProcess[str]:
    with log_file.open("w") if log_file else nullcontext() as sink:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=env,
            text=True,
            errors="replace",
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=sink or subprocess.PIPE,
            stderr=subprocess.STDOUT if sink else subprocess.PIPE,
        )
        _running.add(process)
        try:
            out, err = process.communicate(stdin, timeout=limit)
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            _running.discard(process)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def terminate_all() -> None:
    """Stop the programs that other threads still run: when one part has failed, do not wait for a compile."""
    for process in list(_running):
        process.send_signal(signal.SIGINT)  # as Ctrl-C would: go and debootstrap clean up on it


def succeeds(
    command: Sequence[str | Path], *, timeout_seconds: float = 30, env: Mapping[str, str] | None = None
) -> bool:
    """True when `command` is there and exits 0 in time. For questions, not for work."""
    try:
        run(command, timeout_seconds=timeout_seconds, env=env)
    except ClusterError:
        return False
    return True
