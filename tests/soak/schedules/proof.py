"""Thousands of schedules in processes, with progress; a run that was interrupted goes on where it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.logs import set_log_level
from tests.soak.progress import EVERY_SECONDS, Say, silent
from tests.soak.schedules.schedule import draw
from tests.soak.schedules.tally import Tally, TallyFile
from tests.soak.schedules.tiny_models import write_model
from tests.soak.schedules.worker import Worker

Result = dict[str, Any]
CHUNK = 25  # schedules that a process takes at once
MOST_PROCESSOR_SECONDS, MOST_SECONDS = 120.0, 1800.0  # of one schedule: a busy machine is no fault of the engine's
MOST_FAILURES = 50  # that are written down


def prove(
    *,
    count: int,
    seed: int,
    first: int = 0,
    processes: int | None = None,
    state: Path | None = None,
    version: str = "",
    say: Say = silent,
) -> Result:
    """Run `count` schedules, numbered from `first`.

    `state`: a file to which each chunk is added; those of the same `version` and seed are not run again.
    """
    chunks = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
    file, total, crashes = TallyFile(state, f"{version} {seed}"), Tally(), []
    known = file.read()
    left = [chunk for chunk in chunks if _key(chunk) not in known]
    for chunk in chunks:
        if _key(chunk) in known:
            total.merge(known[_key(chunk)])
    progress, interrupted = _Progress(say, total, count), False
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for model in sorted({draw(seed, number).settings.model for chunk in left for number in chunk}):
            write_model(model, Path(scratch))
        try:
            for chunk, tally in _run_all(left, Path(scratch), seed, processes or os.cpu_count() or 1):
                total.merge(tally)
                file.add(_key(chunk), tally)
                progress.tell(tally)
        except KeyboardInterrupt:
            interrupted = True
        except BrokenProcessPool as error:
            crashes.append(f"a process of the schedules ended: {error}")
    return _result(total, seed, first) | {"crashes": crashes, "interrupted": interrupted}


class _Progress:
    def __init__(self, say: Say, total: Tally, count: int) -> None:
        self._say, self._total, self._count = say, total, count
        self._began = self._told = time.monotonic()
        self._num_before = total.runs
        if total.runs:
            say(f"  {total.runs} of {count} were run before")

    def tell(self, tally: Tally) -> None:
        """Say what a chunk has found, and now and then how far it is."""
        total, now = self._total, time.monotonic()
        for failure in tally.failures:
            self._say(f"  schedule {failure['number']}: {'; '.join(failure['wrong'])[:400]}")
        if now - self._told < EVERY_SECONDS and total.runs < self._count:
            return
        self._told = now
        rate = (total.runs - self._num_before) / (now - self._began)
        self._say(
            f"  {total.runs} of {self._count}, {len(total.failures)} wrong, {sum(total.near_ties.values())} near-ties, "
            f"{rate:.1f} per second, about {(self._count - total.runs) / rate / 60:.0f} min left"
        )


def _result(total: Tally, seed: int, first: int) -> Result:
    memory = total.resident_mib
    return {
        "runs": total.runs,
        "first": first,
        "seed": seed,
        "equal": total.runs - len(total.failures),
        "wrong": dict(total.wrong.most_common()),
        "near_ties": {"tokens": len(total.near_ties), "times": sum(total.near_ties.values())},
        "counts": dict(sorted(total.counts.items())),
        "schedules_that_met": dict(sorted(total.met.items())),
        "executions": dict(total.executions.most_common()),
        "models": dict(sorted(total.models.items())),
        "schedules_per_second_per_process": round(total.runs / total.seconds, 1) if total.seconds else 0.0,
        "resident_mib": {"least": min(memory), "most": max(memory)} if memory else {},
        "failures": total.failures[:MOST_FAILURES],
    }


def _key(chunk: range) -> str:
    return f"{chunk.start}-{chunk.stop}"


# Processes


def _run_all(chunks: list[range], folder: Path, seed: int, processes: int) -> Iterator[tuple[range, Tally]]:
    """As they are done."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(folder, seed))
    try:
        futures = {pool.submit(_run_chunk, chunk): chunk for chunk in chunks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_of_this_process: list[Worker] = []


def _begin(folder: Path, seed: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends everything
    torch.set_num_threads(1)  # tiny products gain nothing from a second one
    set_log_level("error")  # steps without memory are part of it
    _of_this_process.append(Worker(folder, seed))


def _run_chunk(numbers: range) -> Tally:
    (worker,) = _of_this_process
    tally, began = Tally(), time.monotonic()
    for number in numbers:
        schedule = draw(worker.seed, number)
        with at_most(MOST_PROCESSOR_SECONDS, MOST_SECONDS):
            tally.add(number, schedule.settings, worker.run(schedule))
    tally.seconds = time.monotonic() - began
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tally.resident_mib.append(round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1))
    return tally


@contextmanager
def at_most(processor_seconds: float, seconds: float) -> Iterator[None]:
    """A step that never returns, whether it computes or waits, is a crash of its schedule: a TimeoutError."""

    def ring(number: int, _frame: object) -> None:
        found = f"{processor_seconds:g} s of a processor" if number == signal.SIGPROF else f"{seconds:g} s"
        raise TimeoutError(f"not done after {found}")

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, processor_seconds),
        signal.SIGALRM: (signal.ITIMER_REAL, seconds),
    }
    before = {number: signal.signal(number, ring) for number in timers}
    try:
        for timer, limit in timers.values():
            signal.setitimer(timer, limit)
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


# One


def run_one(number: int, seed: int, say: Say) -> bool:
    """Run one schedule in this process and say what it was; return whether nothing is wrong."""
    schedule = draw(seed, number)
    say(f"schedule {number} of seed {seed}: {schedule.settings}")
    for action in schedule.actions:
        say(f"  {action}")
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        worker = Worker(Path(scratch), seed)
        try:
            findings = worker.run(schedule)
        finally:
            worker.close()
    say(f"  {dict(sorted(findings.counts.items()))}")
    for near in findings.near_ties:
        say(f"  near-tie: {near}")
    for one in findings.wrong:
        say(f"  {one.kind}: {one.text}")
    return not findings.wrong
