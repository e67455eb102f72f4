"""`python -m tests.run quick | sample | rest | whole`: what `make test` and `make test-all` do.

The stages are targets of the Makefile and run one after another; the first that fails ends the run. Standard library
only, because the first stage makes the virtual environment.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hack.cluster.paths import cache_folder
from hack.cluster.steps import seconds_text
from tests.run.one_at_a_time import AnotherRunError, one_at_a_time
from tests.run.stages import MAKE_TARGETS, STAGES, Command, expectation, heading
from tests.times.file import Seconds, Times, TimesError, read_times, update_times, warn
from tests.times.report import largest

CHECKOUT = Path(__file__).resolve().parents[2]
INTERRUPTED = 130


def main() -> int:
    """Exit status: 0, that of the stage that failed, 1 where another run is under way, or 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tier", type=Command, choices=list(Command))
    command: Command = parser.parse_args().tier
    try:
        with one_at_a_time(_lock_folder(), f"{MAKE_TARGETS[command]} in {CHECKOUT}") as no_lock:
            warn(no_lock)
            return _run(command)
    except AnotherRunError as error:
        print(f"{MAKE_TARGETS[command]}: {error}. Wait until it ends, or stop it.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{MAKE_TARGETS[command]}: interrupted; the same command starts again.", file=sys.stderr)
        return INTERRUPTED


def _run(command: Command) -> int:
    stages = STAGES[command]
    last_time = _last_times(command).stages
    print(expectation(stages, last_time), flush=True)
    for number, stage in enumerate(stages):
        print(f"\n{heading(stages, number, last_time)}", flush=True)
        status, seconds = _run_stage(stage, command)
        if status:
            print(
                f"\n{MAKE_TARGETS[command]}: `make {stage}` failed after {seconds_text(seconds.wall)}", file=sys.stderr
            )
            return status
        warn(_keep(command, stage, seconds))
    print(f"\nWhere the time went:\n\n{largest(_last_times(command))}")
    return 0


def _run_stage(stage: str, command: Command) -> tuple[int, Seconds]:
    began, cpu_before = time.monotonic(), _cpu_seconds_of_children()
    make = [os.environ.get("MAKE", "make"), "--no-print-directory", stage, f"TIER={command}"]
    with subprocess.Popen(make, cwd=CHECKOUT) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The terminal interrupts make as well. Wait until it has ended: its tests take down what they put up, such
            # as a Helm release. (subprocess.run would kill it within a second.) Another Ctrl-C ends the wait.
            process.wait()
            raise
    return status, Seconds(time.monotonic() - began, _cpu_seconds_of_children() - cpu_before)


def _keep(command: Command, stage: str, seconds: Seconds) -> str:
    """Put the stage's time in the file, and take out stages that the tier no longer has."""

    def change(times: Times) -> None:
        kept: Mapping[str, Seconds] = {**times.stages, stage: seconds}
        _replace(times.stages, {name: kept[name] for name in STAGES[command] if name in kept})

    return update_times(command, change)


def _replace(rows: dict[str, Seconds], by: Mapping[str, Seconds]) -> None:
    rows.clear()
    rows.update(by)


def _last_times(command: Command) -> Times:
    try:
        return read_times().get(command, Times())
    except TimesError as error:
        warn(str(error))
        return Times()


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _lock_folder() -> Path:
    try:
        return cache_folder()
    except OSError:
        return CHECKOUT  # a cache that cannot be made: at least this checkout's runs notice each other


if __name__ == "__main__":
    sys.exit(main())
