"""Put a mutation into a working copy, run the tests that it names, and read which case failed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutations.mutation import Mutation
from tests.mutations.prepared_process import PreparedProcess

PASSED, TEST_FAILED = 0, 1  # pytest's exit statuses; larger ones say that it could not run
TIMEOUT_SECONDS = 1800
SHOWN_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of one mutation. `killed_by`: the case that failed, with its parameters."""

    mutation: Mutation
    killed_by: str | None
    problem: str = ""  # why there is no such case

    def as_json(self, quick: frozenset[str], sample: frozenset[str]) -> dict[str, str | bool | None]:
        """One entry of the results."""
        return {
            "trap": self.mutation.trap,
            "file": self.mutation.file,
            "killed_by": self.killed_by,
            "in_quick": self.killed_by in quick,
            "in_sample": self.killed_by in sample,
        }


def judge(mutation: Mutation, process: PreparedProcess, cases: Path) -> Verdict:
    """Run the tests that a mutation names until one fails. `cases`: see `first_failure`."""
    try:
        with process.copy.mutated(mutation):
            run = _run(process, [*mutation.tests], cases, "-x")
    except subprocess.TimeoutExpired as error:
        return Verdict(mutation, None, f"the tests took more than {error.timeout:.0f} seconds")
    if run.status == TEST_FAILED and run.failed:
        return Verdict(mutation, run.failed[0])
    if run.status < 0 and run.started:  # a signal: the kernel wrote where it may not
        return Verdict(mutation, run.started[-1])
    return Verdict(mutation, None, f"pytest's exit status is {run.status}\n{run.output}")


def without_false_kills(verdicts: Sequence[Verdict], process: PreparedProcess, cases: Path) -> list[Verdict]:
    """Run each case that failed without a mutation: one that fails then, too, says nothing about its mutation."""
    killers = sorted({verdict.killed_by for verdict in verdicts if verdict.killed_by is not None})
    if not killers:
        return [*verdicts]
    try:
        run = _run(process, killers, cases, timeout_seconds=TIMEOUT_SECONDS * (1 + len(killers) // 10))
    except subprocess.TimeoutExpired as error:
        problem = f"without mutations the tests took more than {error.timeout:.0f} seconds"
        return [replace(one, killed_by=None, problem=one.problem or problem) for one in verdicts]
    broken = set(run.failed)
    if run.status not in (PASSED, TEST_FAILED):  # pytest itself, or a signal: nothing is known of those left
        broken |= set(killers) - set(run.started[:-1])
    return [
        replace(one, killed_by=None, problem=f"{one.killed_by} fails without the mutation, too\n{run.output}")
        if one.killed_by in broken
        else one
        for one in verdicts
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    """`status`: pytest's exit status. `started`, `failed`: cases, in order. `output`: its end."""

    status: int
    started: list[str]
    failed: list[str]
    output: str


def _run(
    process: PreparedProcess,
    tests: Sequence[str],
    cases: Path,
    *options: str,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> _Run:
    folder = process.copy.folder
    journal, output = folder / "journal.jsonl", folder / "output.txt"
    journal.write_text("")
    plugin = ["-p", "tests.mutations.first_failure", "--cases", str(cases), "--journal", str(journal)]
    quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = [*quiet, *plugin, *options, *tests]
    status = process.run(arguments, output, timeout_seconds)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    started = [line["started"] for line in lines if "started" in line]
    failed = [line["failed"] for line in lines if "failed" in line]
    return _Run(status, started, failed, output.read_text(errors="replace")[-SHOWN_CHARACTERS:].strip())
