"""A pytest plugin: wall and CPU seconds of each test file, kept in `.tools/test-times.json` with `--keep-times`.

A test's CPU seconds are those of its process (under pytest-xdist the worker's) and of the child processes that ended
during the test, setup and teardown included: `os.times()`, read at the end of each phase. What a pod or a daemon
computes for a test is not in them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

from tests.times.file import PytestTimes, Seconds, update_times, warn

COLLECTION = "(imports and collection)"  # a row; every process of pytest-xdist has its own
E2E = "e2e/"
_COLLECTION_OF_WORKER = "millstream_collection_cpu_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-times", metavar="NAME", help="keep the run's times in .tools/test-times.json by this name")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(meter := _Meter(), "times-meter")
    if config.getoption("--keep-times") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(meter), "times-recorder")


class _Meter:
    """Puts `cpu_seconds` on each report, in the process that runs the test."""

    def __init__(self) -> None:
        self._last_cpu_seconds = _cpu_seconds()
        self.collection_cpu_seconds = 0.0

    def _since_last(self) -> float:
        before, self._last_cpu_seconds = self._last_cpu_seconds, _cpu_seconds()
        return self._last_cpu_seconds - before

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collection_cpu_seconds = self._since_last()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_COLLECTION_OF_WORKER] = self.collection_cpu_seconds

    def pytest_runtest_logstart(self) -> None:
        self._since_last()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        report.cpu_seconds = self._since_last()  # pytest-xdist carries it to the process that the user started
        return report


class _Recorder:
    """Adds reports up in the process that the user started, and keeps them when the run came to its end."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter
        self._collection_of_workers = 0.0
        self._files: dict[str, Seconds] = defaultdict(Seconds)
        self._tests: dict[str, Seconds] = defaultdict(Seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = Seconds(report.duration, getattr(report, "cpu_seconds", 0.0))
        file = report.nodeid.partition("::")[0]
        self._files[file] += seconds
        if file.startswith(E2E):
            self._tests[report.nodeid] += seconds

    def pytest_testnodedown(self, node: Any) -> None:
        self._collection_of_workers += getattr(node, "workeroutput", {}).get(_COLLECTION_OF_WORKER, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or session.shouldstop:
            return  # interrupted: a part would be taken for the whole
        self._files[COLLECTION] = Seconds(0.0, self._meter.collection_cpu_seconds + self._collection_of_workers)
        call, tier = session.config.getoption("--keep-times"), session.config.getoption("--tier")
        measured = PytestTimes(dict(self._files), dict(self._tests))
        warn(update_times(tier, lambda times: times.pytest.update({call: measured})))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
