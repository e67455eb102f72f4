"""The file of times: what a run writes, what a reader makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.times import file as times_file
from tests.times.file import PytestTimes, Seconds, Times, TimesError, read_times, update_times
from tests.times.record import COLLECTION
from tests.times.report import compared, largest

pytestmark = pytest.mark.deep

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ("-p", "no:asyncio", "-p", "tests.tiers.plugin", "-p", "tests.times.record", "-q", "--keep-times", "unit")
BUSY = """
import subprocess, sys, time

SPIN = "import time; end = time.process_time() + 0.2\\nwhile time.process_time() < end: pass"

def test_in_this_process(): exec(SPIN)
def test_in_a_child(): subprocess.run([sys.executable, "-c", SPIN], check=True)
def test_asleep(): time.sleep(0.2)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / ".tools" / "test-times.json"
    monkeypatch.setattr(update_times, "__defaults__", (file,))
    return file


def keep(path: Path, tier: str, **stages: float) -> None:
    def change(times: Times) -> None:
        times.stages.update({name: Seconds(wall, wall / 2) for name, wall in stages.items()})

    assert update_times(tier, change, path) == ""


def test_what_is_kept_is_read_again_and_other_tiers_stay(path: Path) -> None:
    keep(path, "quick", lint=25.0)
    keep(path, "sample", lint=24.0)
    keep(path, "quick", unit=200.0)
    times = read_times(path)
    assert times["quick"].stages == {"lint": Seconds(25.0, 12.5), "unit": Seconds(200.0, 100.0)}
    assert times["sample"].stages == {"lint": Seconds(24.0, 12.0)}


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_run_keeps_wall_and_cpu_seconds_of_its_files_children_included(
    pytester: pytest.Pytester, path: Path, processes: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_busy=BUSY)
    pytester.runpytest_inprocess(*PLUGINS, "--tier", "sample", *processes).assert_outcomes(passed=3)
    files = read_times(path)["sample"].pytest["unit"].files
    assert set(files) == {"test_busy.py", COLLECTION}
    assert files["test_busy.py"].wall >= 0.6
    assert files["test_busy.py"].cpu >= 0.4


def test_a_run_that_was_interrupted_keeps_nothing(pytester: pytest.Pytester, path: Path) -> None:
    pytester.makepyfile(test_stopped="def test_a(): pass\ndef test_b(): raise KeyboardInterrupt")
    result = pytester.runpytest_inprocess(*PLUGINS, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert not path.exists()


def test_a_file_of_tests_that_is_gone_goes_with_the_next_run(pytester: pytest.Pytester, path: Path) -> None:
    pytester.makepyfile(test_old="def test_a(): pass")
    pytester.runpytest_inprocess(*PLUGINS)
    (pytester.path / "test_old.py").rename(pytester.path / "test_new.py")
    pytester.runpytest_inprocess(*PLUGINS)
    assert set(read_times(path)["whole"].files()) == {"test_new.py", COLLECTION}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', '{"format": 1, "tiers": {"quick": {}}}', "\0"])
def test_a_damaged_file_is_named_and_replaced(path: Path, damage: str) -> None:
    path.parent.mkdir()
    path.write_text(damage)
    with pytest.raises(TimesError, match=r"test-times\.json"):
        read_times(path)
    keep(path, "quick", lint=25.0)
    assert set(read_times(path)) == {"quick"}


def test_a_file_of_another_format_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"format": times_file.FORMAT + 1, "tiers": {}}))
    with pytest.raises(TimesError, match="format"):
        read_times(path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".tools").write_text("a file where the folder should be")
    reason = update_times("quick", lambda times: None, tmp_path / ".tools" / "test-times.json")
    assert reason.startswith("the times of this run are not kept: ")
    assert "\n" not in reason


def times_of(stages: dict[str, float], files: dict[str, float], tests: dict[str, float]) -> Times:
    def seconds(rows: dict[str, float]) -> dict[str, Seconds]:
        return {name: Seconds(wall, wall / 2) for name, wall in rows.items()}

    return Times(seconds(stages), {"unit": PytestTimes(seconds(files), seconds(tests))})


def test_the_largest_come_first_and_are_ten() -> None:
    times = times_of({"unit": 200.0}, {f"test_{number}.py": float(number) for number in range(20)}, {})
    lines = largest(times).splitlines()
    assert [line.split()[-1] for line in lines if ".py" in line] == [f"test_{number}.py" for number in range(19, 9, -1)]
    assert any(line.split() == ["200", "100", "unit"] for line in lines)


def test_two_runs_are_compared_with_ratios_and_what_only_one_of_them_has() -> None:
    before = times_of({"unit": 200.0}, {"test_a.py": 100.0, "test_gone.py": 4.0}, {"e2e/test_x.py::test_it": 9.0})
    after = times_of({"unit": 50.0}, {"test_a.py": 40.0, "test_new.py": 3.0}, {})
    text = compared(before, after)
    rows = {line.split()[-1]: line.split()[:-1] for line in text.splitlines() if line}
    assert rows["unit"] == ["200", "->", "50", "0.25", "100", "->", "25", "0.25"]
    assert rows["test_a.py"] == ["100", "->", "40", "0.40", "50", "->", "20", "0.40"]
    assert rows["test_new.py"] == ["–", "->", "3", "–", "->", "2"]
    assert rows["e2e/test_x.py::test_it"] == ["9", "->", "–", "4", "->", "–"]


def test_the_command_compares_two_files_and_names_a_tier_that_one_of_them_lacks(tmp_path: Path) -> None:
    keep(tmp_path / "before.json", "whole", unit=200.0)
    keep(tmp_path / "after.json", "sample", unit=100.0)
    command = ["compare", str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    good = times_command(*command, "--tiers", "whole", "sample")
    assert (good.returncode, good.stderr) == (0, "")
    assert "0.50" in good.stdout
    for arguments, words in (((), "no tier in common"), (("--tiers", "whole", "quick"), "has no tier quick")):
        bad = times_command(*command, *arguments)
        assert bad.returncode == 2
        assert words in bad.stderr
        assert "Traceback" not in bad.stderr


def times_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.times", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
