"""A pytest plugin: run the cases of the quick tier first, then those of the sample, then all others.

It writes what started and what failed to the file that `--journal` names. `--cases` is a JSON file of two lists of node
IDs, `quick` and `sample`. With `-x`, the case that failed is of the smallest tier that notices anything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutations")
    group.addoption("--cases", type=Path, required=True, help="the node IDs of the tiers")
    group.addoption("--journal", type=Path, required=True, help="where each start and failure is written")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_FirstFailure(config.getoption("--cases"), config.getoption("--journal")))


class _FirstFailure:
    def __init__(self, cases: Path, journal: Path) -> None:
        tiers: dict[str, list[str]] = json.loads(cases.read_text())
        self._quick, self._sample = set(tiers["quick"]), set(tiers["sample"])
        self._journal = journal

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: (item.nodeid not in self._quick, item.nodeid not in self._sample))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed":  # and not "rerun", the first attempt of a test with processes
            self._write({"failed": report.nodeid})

    def _write(self, line: dict[str, Any]) -> None:
        with self._journal.open("a") as file:  # closed at once: a kernel may end the process
            file.write(json.dumps(line) + "\n")
