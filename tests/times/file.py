"""`.tools/test-times.json`: wall and CPU seconds of the last run of each tier, by stage, test file and end-to-end test.

{"format": 1,
 "tiers": {"quick": {"stages": {"unit": {"wall_seconds": 231.0, "cpu_seconds": 418.2}},
                     "pytest": {"e2e-own": {"files": {"e2e/test_chat.py": {"wall_seconds": 9.1, "cpu_seconds": 0.9}},
                                            "tests": {"e2e/test_chat.py::test_…": {…}}}}}}}

A stage is a target of the Makefile; a stage may call pytest several times, under a name for each call. Stages and
calls replace their own entries when they came to their end, so an interrupted run leaves times of whole ones. Nothing
here needs more than the standard library: `make test` runs it before the virtual environment exists.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
TIMES_FILE = Path(__file__).resolve().parents[2] / ".tools" / "test-times.json"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall seconds, and CPU seconds of all threads and ended child processes."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


@dataclass(frozen=True, slots=True)
class PytestTimes:
    """One call of pytest. Wall seconds are added up over processes that ran at the same time."""

    files: dict[str, Seconds] = field(default_factory=dict)
    tests: dict[str, Seconds] = field(default_factory=dict)  # end-to-end tests alone: unit tests are thousands


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one tier."""

    stages: dict[str, Seconds] = field(default_factory=dict)
    pytest: dict[str, PytestTimes] = field(default_factory=dict)

    def files(self) -> dict[str, Seconds]:
        """Test file -> its seconds in all calls of pytest."""
        return _sum(call.files for call in self.pytest.values())

    def tests(self) -> dict[str, Seconds]:
        """End-to-end test -> its seconds."""
        return _sum(call.tests for call in self.pytest.values())


TimesByTier = dict[str, Times]


class TimesError(Exception):
    """A file of times that cannot be read; the message is one line for the user."""


def read_times(path: Path = TIMES_FILE) -> TimesByTier:
    """The times by tier; empty where there is no file.

    Raises:
        TimesError: the file is damaged or of another format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise TimesError(f"{path} has format {content['format']!r}, not {FORMAT}")
        return {tier: _times(record) for tier, record in content["tiers"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TimesError(f"{path} is no file of test times ({type(error).__name__}: {error})") from error


def update_times(tier: str, change: Callable[[Times], None], path: Path = TIMES_FILE) -> str:
    """Change the times of a tier in the file; returns why that was not possible, or an empty string.

    A damaged file is replaced. The file is written whole or not at all.
    """
    try:
        times_by_tier = read_times(path)
    except TimesError:
        times_by_tier = {}
    change(times_by_tier.setdefault(tier, Times()))
    content = {"format": FORMAT, "tiers": {name: _record(times) for name, times in sorted(times_by_tier.items())}}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        return f"the times of this run are not kept: {error}"
    return ""


def warn(text: str) -> None:
    """One line on stderr, where `text` says anything."""
    if text:
        print(f"test times: {text}", file=sys.stderr)


def _sum(rows: Iterable[Mapping[str, Seconds]]) -> dict[str, Seconds]:
    total: dict[str, Seconds] = {}
    for row in rows:
        for name, seconds in row.items():
            total[name] = total.get(name, Seconds()) + seconds
    return total


def _record(times: Times) -> dict[str, Any]:
    calls = {
        name: {"files": _rows(call.files), "tests": _rows(call.tests)} for name, call in sorted(times.pytest.items())
    }
    return {"stages": _rows(times.stages), "pytest": calls}


def _rows(seconds_by_name: Mapping[str, Seconds]) -> dict[str, Any]:
    return {
        name: {"wall_seconds": round(seconds.wall, 2), "cpu_seconds": round(seconds.cpu, 2)}
        for name, seconds in sorted(seconds_by_name.items())
    }


def _times(record: Mapping[str, Any]) -> Times:
    calls = {
        name: PytestTimes(_seconds(call["files"]), _seconds(call["tests"])) for name, call in record["pytest"].items()
    }
    return Times(_seconds(record["stages"]), calls)


def _seconds(rows: Mapping[str, Any]) -> dict[str, Seconds]:
    return {name: Seconds(float(row["wall_seconds"]), float(row["cpu_seconds"])) for name, row in rows.items()}
