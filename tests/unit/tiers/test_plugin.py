"""The plugin in a real run of pytest over files of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
FILE = """
import pytest

@pytest.mark.matrix("family")
@pytest.mark.parametrize("mode", ["plain", "sliced", "replayed", "parallel", "overlapped"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_parity(family, mode): pass

def test_plain(): pass
"""
DEEP_FILE = """
import pytest

pytestmark = pytest.mark.deep

def test_slow(): pass

@pytest.mark.quick
def test_but_this(): pass
"""
PLUGINS = ("-p", "no:asyncio", "-p", "tests.tiers.plugin", "-p", "tests.times.record", "-q")


@pytest.fixture(autouse=True)
def files(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_file=FILE, test_deep=DEEP_FILE)
    (e2e := pytester.mkdir("e2e")).joinpath("test_cluster.py").write_text(DEEP_FILE.replace("pytest.mark.deep", "[]"))
    assert e2e.is_dir()


def run_tests(pytester: pytest.Pytester, *arguments: str) -> set[str]:
    result = pytester.inline_run(*PLUGINS, *arguments)
    passed, skipped, failed = result.listoutcomes()
    assert not skipped
    assert not failed
    return {report.nodeid for report in passed}


def test_the_quick_tier_has_no_deep_test_and_of_end_to_end_tests_the_quick_ones(pytester: pytest.Pytester) -> None:
    assert run_tests(pytester, "--tier", "quick") == {
        "test_file.py::test_parity[llama-plain]",
        "test_file.py::test_parity[qwen2-plain]",
        "test_file.py::test_plain",
        "test_deep.py::test_but_this",
        "e2e/test_cluster.py::test_but_this",
    }


def test_a_run_without_a_tier_has_everything(pytester: pytest.Pytester) -> None:
    assert len(run_tests(pytester)) == 10 + 1 + 2 + 2


def test_the_day_picks_the_quarter_and_four_days_see_all(pytester: pytest.Pytester) -> None:
    days = [run_tests(pytester, "--tier", "sample", "--matrix-day", str(day)) for day in range(4)]
    assert {len(day) for day in days} == {2 + 8 // 4 + 1 + 2 + 2}
    assert set().union(*days) == run_tests(pytester)
    assert run_tests(pytester, "--tier", "sample", "--matrix-day", "4") == days[0]


def test_processes_of_xdist_run_the_same_sample(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest(*PLUGINS, "--tier", "sample", "--matrix-day", "2", "-n", "2")
    result.assert_outcomes(passed=9)


def test_the_header_says_how_to_repeat_it(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest(*PLUGINS[:-1], "--tier", "sample", "--matrix-day", "740000")
    result.stdout.fnmatch_lines(["tier: --tier sample --matrix-day 740000"])


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ('"mdoe"', '["plain"]', "*its matrix has no argument mdoe*"),
        ('"mode"', "[object()]", "*mode of its matrix needs values with a name*"),
    ],
)
def test_a_matrix_that_cannot_be_read_is_an_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, rows: str, values: str, message: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        test_wrong=f"""
        import pytest
        @pytest.mark.matrix({rows})
        @pytest.mark.parametrize("mode", {values})
        def test_it(mode): pass
        """
    )
    result = pytester.runpytest_subprocess(*PLUGINS, "test_wrong.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
