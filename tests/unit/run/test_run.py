"""`make test` as a process, over a Makefile of its own: stages, times, a failure, an interruption, two at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.run.one_at_a_time import LOCK
from tests.run.stages import MAKE_TARGETS, STAGES, Command, expectation, heading
from tests.times.file import Seconds, read_times

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[3]
STAGE = "{name}:\n\t@echo {name} of $(TIER)\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose stages say their name."""
    root = tmp_path / "checkout"
    for folder in ("tests/run", "tests/times", "hack/cluster"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "go"))
    write_makefile(root)
    return root


def write_makefile(root: Path, **stages: str) -> None:
    rules = {name: STAGE.format(name=name) for names in STAGES.values() for name in names} | stages
    (root / "Makefile").write_text(f".PHONY: {' '.join(rules)}\n" + "\n".join(rules.values()))


def command_of(root: Path, tier: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.run", tier],
        cwd=root,
        env=os.environ | {"XDG_CACHE_HOME": str(root.parent / "cache"), "MAKEFLAGS": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's job in the background ignores the signal, and what it starts inherits that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def run(root: Path, tier: str = "quick") -> tuple[int, str, str]:
    process = command_of(root, tier)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("tier", list(Command))
def test_the_stages_run_in_order_in_their_tier_and_their_times_are_kept(checkout: Path, tier: Command) -> None:
    status, out, err = run(checkout, tier)
    assert (status, err) == (0, "")
    assert [line for line in out.splitlines() if " of " in line and "==" not in line] == [
        f"{stage} of {tier}" for stage in STAGES[tier]
    ]
    assert set(read_times(checkout / ".tools" / "test-times.json")[tier].stages) == set(STAGES[tier])
    assert "Where the time went:" in out


def test_quick_and_rest_are_together_what_a_run_of_everything_does() -> None:
    assert {*STAGES[Command.QUICK], *STAGES[Command.REST]} == {*STAGES[Command.SAMPLE]} == {*STAGES[Command.WHOLE]}
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "test-all", "test-rest", *STAGES[Command.SAMPLE]):
        assert f"\n{target}:" in makefile
    assert set(MAKE_TARGETS) == set(Command)


@pytest.mark.parametrize("tier", [tier for tier in Command if "faults" in STAGES[tier]])
def test_the_stage_under_faults_has_tests_in_every_tier_that_runs_it(tier: Command) -> None:
    """pytest fails where all tests are deselected: tests that no quick stage runs belong to the rest."""
    arguments = ("-m", "pytest", "tests/soak", "--tier", tier, "--collect-only", "-q", "-p", "no:cacheprovider")
    collected = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert "tests/soak/test_sample.py::" in collected.stdout


def test_the_second_run_says_how_long_it_takes(checkout: Path) -> None:
    assert "not known here before the first run" in run(checkout)[1]
    out = run(checkout)[1]
    assert "last time" in out
    assert "not known" not in out


def test_a_stage_that_fails_ends_the_run_by_its_name(checkout: Path) -> None:
    write_makefile(checkout, unit="unit:\n\t@exit 3\n")
    status, out, err = run(checkout)
    assert status == 2  # make's
    assert "make test: `make unit` failed after" in err
    assert "cluster-up of" not in out
    assert "unit" not in read_times(checkout / ".tools" / "test-times.json")["quick"].stages


def test_an_interrupted_run_keeps_whole_stages_and_the_next_one_is_right(checkout: Path) -> None:
    # Short sleeps: neither make nor a shell passes the signal on to a child that it starts a moment later.
    taken_down = (
        "trap 'sleep 1; echo taken down; exit 1' INT; echo unit began; for i in $$(seq 600); do sleep 0.1; done"
    )
    write_makefile(checkout, unit=f"unit:\n\t@{taken_down}\n")
    process = command_of(checkout, "quick")
    assert process.stdout
    for line in process.stdout:
        if line.startswith("unit began"):
            break
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert "taken down" in out, "make was not waited for"
    assert process.returncode == 130
    assert "make test: interrupted; the same command starts again." in err
    assert "Traceback" not in err
    assert set(read_times(checkout / ".tools" / "test-times.json")["quick"].stages) == {"venv", "lint"}
    write_makefile(checkout)
    assert run(checkout)[0] == 0


def test_another_interrupt_ends_the_wait_for_a_stage_that_does_not_end(checkout: Path) -> None:
    make = checkout / "never_ends"
    make.write_text(
        f"#!{sys.executable}\nimport os, signal\n"
        "signal.signal(signal.SIGINT, lambda *_: print('went on', flush=True))\n"
        "print('began', os.getpid(), flush=True)\nwhile True:\n    signal.pause()\n"
    )
    make.chmod(0o755)
    process = command_of(checkout, "quick", MAKE=str(make))
    assert process.stdout
    stage = next(int(line.split()[1]) for line in process.stdout if line.startswith("began"))
    try:
        os.killpg(process.pid, signal.SIGINT)
        next(line for line in process.stdout if line == "went on\n")
        assert process.poll() is None, "the stage was not waited for"
        for _ in range(6):  # two that arrive before Python has seen the first are one
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
                break
        assert process.returncode == 130
        os.kill(stage, 0)  # it was left, not killed
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert "make test: interrupted; the same command starts again." in err
    assert "Traceback" not in err


def test_a_second_run_at_once_says_so_and_ends(checkout: Path) -> None:
    write_makefile(checkout, venv="venv:\n\t@echo venv began\n\t@read line < gate\n")
    os.mkfifo(checkout / "gate")
    first = command_of(checkout, "sample")
    assert first.stdout
    for line in first.stdout:
        if line.startswith("venv began"):
            break
    status, out, err = run(checkout)
    assert (status, out) == (1, "")
    assert f"another run of the tests is under way (process {first.pid}: make test-all in " in err
    (checkout / "gate").write_text("\n")
    first.communicate(timeout=60)
    assert first.returncode == 0
    write_makefile(checkout)
    assert run(checkout)[0] == 0


def test_a_cache_that_cannot_hold_the_lock_is_one_line(checkout: Path) -> None:
    (checkout.parent / "cache" / "millstream" / LOCK).mkdir(parents=True)
    status, _, err = run(checkout)
    assert status == 0
    assert err.splitlines() == [err.strip()]
    assert "two runs at once would not notice each other" in err


def test_damaged_times_are_one_line_and_the_run_goes_on(checkout: Path) -> None:
    (checkout / ".tools").mkdir()
    (checkout / ".tools" / "test-times.json").write_text("{")
    status, out, err = run(checkout)
    assert status == 0
    assert len(err.splitlines()) == 1
    assert "test-times.json" in err
    assert "not known here before the first run" in out


def test_what_is_expected_is_the_last_times_added_up() -> None:
    known = {"lint": Seconds(25.0, 0.0), "unit": Seconds(200.0, 0.0)}
    assert expectation(("lint", "unit"), known) == "It took 3 min 45 s last time."
    assert expectation(("lint", "unit", "e2e"), known) == "It takes more than 3 min 45 s: no times are known of e2e."
    assert heading(("lint", "unit"), 1, known) == "== make unit (stage 2 of 2; last time 3 min 20 s; 3 min 20 s to go)"
    assert heading(("lint", "unit"), 0, {}) == "== make lint (stage 1 of 2)"
