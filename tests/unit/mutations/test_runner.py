"""What `python -m tests.mutations` concludes from the runs of pytest that it starts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutations import kills, results
from tests.mutations.__main__ import broken_promises
from tests.mutations.first_failure import _FirstFailure
from tests.mutations.kills import Verdict, without_false_kills
from tests.mutations.mutation import REPOSITORY, Mutation
from tests.mutations.prepared_process import PreparedProcess
from tests.mutations.tiers import Tiers
from tests.mutations.working_copy import WorkingCopy

pytestmark = pytest.mark.deep

QUICK, DEEP = "tests/unit/a/test_a.py::test_it[0]", "tests/unit/a/test_b.py::test_it"
MUTATION = Mutation.of("a limit is | another", "cli/limits.py", "3", "4", "a/test_a.py::test_it")
TIERS = Tiers(740000, frozenset({QUICK}), frozenset({QUICK, DEEP}))
FILE = "tests/mutations/mutation.py"
PASSED, FAILED, SIGNAL, INTERNAL = 0, 1, -11, 3


def plugin(folder: Path) -> tuple[_FirstFailure, Path]:
    cases, journal = folder / "cases.json", folder / "journal.jsonl"
    cases.write_text(json.dumps({"quick": ["c", "b"], "sample": ["d"]}))
    return _FirstFailure(cases, journal), journal


def test_cases_of_smaller_tiers_are_run_first(tmp_path: Path) -> None:
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in "abcde"]
    plugin(tmp_path)[0].pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["b", "c", "d", "a", "e"]


def test_starts_and_failures_are_written_and_first_attempts_are_not(tmp_path: Path) -> None:
    first_failure, journal = plugin(tmp_path)
    first_failure.pytest_runtest_logstart("b")
    for outcome in ("rerun", "passed", "failed"):
        report: Any = SimpleNamespace(outcome=outcome, nodeid="b")
        first_failure.pytest_runtest_logreport(report)
    assert [json.loads(line) for line in journal.read_text().splitlines()] == [{"started": "b"}, {"failed": "b"}]


@pytest.mark.parametrize(
    ("status", "started", "failed", "killed_by"),
    [
        (FAILED, [QUICK, DEEP], [DEEP], DEEP),
        (PASSED, [QUICK, DEEP], [], None),
        (SIGNAL, [QUICK, DEEP], [], DEEP),  # a kernel that writes where it may not
        (SIGNAL, [], [], None),  # before any test
        (2, [], [], None),  # the mutated file cannot be imported
    ],
)
def test_a_mutation_is_killed_by_a_case_that_fails_or_dies(
    status: int, started: list[str], failed: list[str], killed_by: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kills._Run(status, started, failed, "the end")
    monkeypatch.setattr(kills, "_run", lambda *_, **__: run)
    copy = SimpleNamespace(mutated=lambda _: contextlib.nullcontext())
    process: Any = SimpleNamespace(copy=copy)
    verdict = kills.judge(MUTATION, process, Path("cases.json"))
    assert verdict.killed_by == killed_by
    assert (str(status) in verdict.problem) is (killed_by is None)


@pytest.mark.parametrize(
    ("status", "started", "failed", "kept"),
    [
        (PASSED, [QUICK, DEEP], [], {QUICK, DEEP}),
        (FAILED, [QUICK, DEEP], [QUICK], {DEEP}),
        (SIGNAL, [QUICK, DEEP], [], {QUICK}),
        (INTERNAL, [], [], set[str]()),
    ],
)
def test_a_case_that_fails_without_the_mutation_kills_nothing(
    status: int, started: list[str], failed: list[str], kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kills._Run(status, started, failed, "the end")
    monkeypatch.setattr(kills, "_run", lambda *_, **__: run)
    verdicts = [Verdict(MUTATION, case) for case in (QUICK, DEEP, None)]
    process: Any = None
    found = without_false_kills(verdicts, process, Path("cases.json"))
    assert {verdict.killed_by for verdict in found} - {None} == kept
    assert [bool(verdict.problem) for verdict in found[:2]] == [case not in kept for case in (QUICK, DEEP)]


def test_the_table_says_what_each_tier_kills() -> None:
    found = results.results_of([Verdict(MUTATION, case) for case in (QUICK, DEEP, None)], TIERS, 1.0)
    assert (found["total"], found["killed"], found["in_quick"], found["in_sample"]) == (3, 2, 1, 2)
    lines = results.markdown(found).splitlines()
    assert lines[2:5] == [
        "| `cli/limits.py`: a limit is \\| another | `a/test_a.py::test_it[0]` | yes | yes |",
        "| `cli/limits.py`: a limit is \\| another | `a/test_b.py::test_it` | no | yes |",
        "| `cli/limits.py`: a limit is \\| another | **nothing** | no | no |",
    ]
    assert "2 of 3 mutants" in lines[-1]
    assert "1 (33%), the sample of day 740000 2 (67%)" in lines[-1]


def test_a_promise_whose_test_is_not_quick_is_named() -> None:
    assert broken_promises([Verdict(MUTATION, QUICK), Verdict(MUTATION, None)], TIERS) == []
    (line,) = broken_promises([Verdict(MUTATION, DEEP)], TIERS)
    assert MUTATION.tests[0] in line


def test_a_copy_has_what_git_knows_and_one_mutation_at_a_time(tmp_path: Path) -> None:
    copy = WorkingCopy(tmp_path / "copy")
    mutated, original = tmp_path / "copy" / FILE, (REPOSITORY / FILE).read_text(encoding="utf-8")
    assert mutated.read_text(encoding="utf-8") == original
    assert not (tmp_path / "copy" / ".venv").exists()
    with copy.mutated(Mutation.of("the class has another name", FILE, "class Mutation:", "class Mistake:")):
        assert "class Mistake:" in mutated.read_text(encoding="utf-8")
        assert (REPOSITORY / FILE).read_text(encoding="utf-8") == original
    assert mutated.read_text(encoding="utf-8") == original
    roots = copy.environment()["PYTHONPATH"].split(":")
    assert str(tmp_path / "copy" / "operator") in roots


TESTS = """
import os, signal, time

def test_passes(): print(os.getpid())
def test_fails(): assert False, "as it should"
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_hangs(): time.sleep(600)
"""


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[PreparedProcess]:
    """Runs pytest in a folder with one file of tests."""
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    copy: Any = SimpleNamespace(folder=tmp_path, environment=lambda: environment)
    process = PreparedProcess(copy, imported=["pytest"])
    yield process
    process.close()


def test_each_run_is_a_fork_of_one_process(prepared: PreparedProcess, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"

    def run(test: str, timeout_seconds: float = 300) -> int:
        return prepared.run(["-p", "no:cacheprovider", f"test_it.py::{test}"], output, timeout_seconds)

    assert run("test_passes") == PASSED
    assert run("test_fails") == FAILED
    assert "as it should" in output.read_text()
    assert run("test_dies") == -9
    assert run("test_passes") == PASSED, "the process outlives what it forked"
    with pytest.raises(subprocess.TimeoutExpired):
        run("test_hangs", timeout_seconds=0)
    assert run("test_passes") == PASSED, "another process takes its place"
