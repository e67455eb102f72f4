"""Thousands of schedules in processes, with progress; a run that was interrupted goes on where it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.logs import set_log_level
from tests.soak.progress import EVERY_SECONDS, Say, silent
from tests.soak.schedules.drafts import draft_config
from tests.soak.schedules.plan import SCHEDULES, Plan
from tests.soak.schedules.schedule import Settings
from tests.soak.schedules.tally import Tally, TallyFile
from tests.soak.schedules.tiny_models import write_model
from tests.soak.schedules.worker import Worker

Result = dict[str, Any]
MOST_PROCESSOR_SECONDS, MOST_SECONDS = 120.0, 1800.0  # of one schedule: a busy machine is no fault of the engine's
MOST_FAILURES = 50  # that are written down
REQUESTS = "compared requests"


def prove(
    *,
    count: int,
    seed: int,
    first: int = 0,
    processes: int | None = None,
    state: Path | None = None,
    version: str = "",
    say: Say = silent,
    plan: Plan = SCHEDULES,
    requests: int | None = None,
) -> Result:
    """Run `count` schedules of `plan`, numbered from `first`; with `requests` those that compare so many of them.

    `state`: a file to which each chunk is added; those of the same `version` and seed are not run again.
    """
    starts = range(first, first + count, plan.chunk)
    chunks = [range(start, min(start + plan.chunk, first + count)) for start in starts]
    file, total, crashes = TallyFile(state, f"{version} {seed}"), Tally(), []
    left = _left(chunks, file.read(), total, requests)
    progress, interrupted = _Progress(say, total, requests or count, counts_requests=requests is not None), False
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        _write_models([plan.draw(seed, number).settings for chunk in left for number in chunk], Path(scratch))
        try:
            for chunk, tally in _run_all(left, Path(scratch), seed, processes or os.cpu_count() or 1, plan):
                file.add(_key(chunk), tally)
                total.merge(tally)
                progress.tell(tally)
                if _is_enough(total, requests):
                    break
        except KeyboardInterrupt:
            interrupted = True
        except BrokenProcessPool as error:
            crashes.append(f"a process of the schedules ended: {error}")
    result = _result(total, seed, first) | {"crashes": crashes, "interrupted": interrupted}
    return result if requests is None else result | {"requests asked": requests}


def _left(chunks: list[range], known: dict[str, Tally], total: Tally, requests: int | None) -> list[range]:
    """Add what is known of the chunks to `total`, as far as it is asked for; return those that have to run."""
    for chunk in chunks:
        if _key(chunk) in known and not _is_enough(total, requests):
            total.merge(known[_key(chunk)])
    return [] if _is_enough(total, requests) else [chunk for chunk in chunks if _key(chunk) not in known]


def _write_models(all_settings: list[Settings], root: Path) -> None:
    """Write all models, draft models and heads before processes share them."""
    for settings in {(one.model, one.drafts, one.max_draft_tokens is None): one for one in all_settings}.values():
        draft_config(settings, write_model(settings.model, root)[0])


def _is_enough(total: Tally, requests: int | None) -> bool:
    return requests is not None and total.counts[REQUESTS] >= requests


class _Progress:
    def __init__(self, say: Say, total: Tally, goal: int, *, counts_requests: bool) -> None:
        self._say, self._total = say, total
        self._goal, self._counts_requests = goal, counts_requests
        self._began = self._told = time.monotonic()
        self._num_before = self._done
        if total.runs:
            say(f"  {self._done} of {self._goal} were run before")

    @property
    def _done(self) -> int:
        return self._total.counts[REQUESTS] if self._counts_requests else self._total.runs

    def tell(self, tally: Tally) -> None:
        """Say what a chunk has found, and now and then how far it is."""
        total, now = self._total, time.monotonic()
        for failure in tally.failures:
            self._say(f"  schedule {failure['number']}: {'; '.join(failure['wrong'])[:400]}")
        if now - self._told < EVERY_SECONDS and self._done < self._goal:
            return
        self._told = now
        rate = max(self._done - self._num_before, 1) / (now - self._began)
        self._say(
            f"  {self._done} of {self._goal}, {len(total.failures)} wrong, {sum(total.near_ties.values())} near-ties, "
            f"{rate:.1f} per second, about {max(self._goal - self._done, 0) / rate / 60:.0f} min left"
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
        "near_ties_met": dict(total.near_ties.most_common(MOST_FAILURES)),
        "counts": dict(sorted(total.counts.items())),
        "schedules_that_met": dict(sorted(total.met.items())),
        "executions": dict(total.executions.most_common()),
        "models": dict(sorted(total.models.items())),
        "by_draft": total.by_draft(),
        "parameters": dict(total.parameters.most_common()),
        "schedules_per_second_per_process": round(total.runs / total.seconds, 1) if total.seconds else 0.0,
        "resident_mib": {"least": min(memory), "most": max(memory)} if memory else {},
        "failures": total.failures[:MOST_FAILURES],
    }


def _key(chunk: range) -> str:
    return f"{chunk.start}-{chunk.stop}"


# Processes


def _run_all(chunks: list[range], folder: Path, seed: int, processes: int, plan: Plan) -> Iterator[tuple[range, Tally]]:
    """In their order, so that a run which stops early has always run the same ones."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(folder, seed, plan))
    try:
        futures = {pool.submit(_run_chunk, chunk): chunk for chunk in chunks}
        for future in futures:
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


_of_this_process: list[tuple[Worker, Plan]] = []


def _begin(folder: Path, seed: int, plan: Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends everything
    torch.set_num_threads(1)  # tiny products gain nothing from a second one
    set_log_level("error")  # steps without memory are part of it
    _of_this_process.append((Worker(folder, seed, plan.processors_of, plan.sampled_share), plan))


def _run_chunk(numbers: range) -> Tally:
    ((worker, plan),) = _of_this_process
    tally, began = Tally(), time.monotonic()
    for number in numbers:
        schedule = plan.draw(worker.seed, number)
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


def run_one(number: int, seed: int, say: Say, plan: Plan = SCHEDULES) -> bool:
    """Run one schedule in this process and say what it was; return whether nothing is wrong."""
    schedule = plan.draw(seed, number)
    say(f"schedule {number} of seed {seed}: {schedule.settings}")
    for action in schedule.actions:
        say(f"  {action}")
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        worker = Worker(Path(scratch), seed, plan.processors_of, plan.sampled_share)
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
