"""A pytest plugin: `--tier`, `--matrix-day`, and the markers `deep`, `quick` and `matrix`.

A test in the quick tier is one that is not `deep`. `quick` on a test takes it out of the `deep` of its file. End-to-end
tests are deep unless they are `quick`.
"""

from __future__ import annotations

import datetime
from enum import Enum

import pytest

from tests.tiers.selection import Case, Tier, selected

E2E = "e2e/"


def pytest_addoption(parser: pytest.Parser) -> None:
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    group = parser.getgroup("tiers")
    group.addoption("--tier", type=Tier, choices=list(Tier), default=Tier.WHOLE, help="how much of the tests to run")
    # pytest-xdist passes the value on: its processes agree at midnight, too.
    group.addoption("--matrix-day", type=int, default=today, metavar="N", help="which quarter of the matrices to run")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "deep: `make test` leaves it out; `make test-all` runs it",
        "quick: `make test` runs it although its file is deep, or it is an end-to-end test",
        "matrix(*arguments): cases differ in a cell of a matrix, whose rows these arguments name; the first of each "
        "row is its cheapest; `make test-all` runs it and a quarter of the others",
    ):
        config.addinivalue_line("markers", line)


def pytest_report_header(config: pytest.Config) -> str | None:
    tier: Tier = config.getoption("--tier")
    if tier is Tier.WHOLE:
        return None
    return f"tier: --tier {tier} --matrix-day {config.getoption('--matrix-day')}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = [case_of(item) for item in items]
    chosen = selected(cases, config.getoption("--tier"), config.getoption("--matrix-day"))
    left_out = [item for item in items if item.nodeid not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in chosen]


def case_of(item: pytest.Item) -> Case:
    """What the selection has to know of a test.

    Raises:
        pytest.UsageError: its `matrix` names an argument that it has not, or one whose values have no name.
    """
    matrix = item.get_closest_marker("matrix")
    if matrix is None:
        return Case(item.nodeid, _is_deep(item))
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if unknown := set(matrix.args) - set(parameters):
        raise pytest.UsageError(f"{item.nodeid}: its matrix has no argument {', '.join(sorted(unknown))}")
    row = tuple(_name(item, argument, parameters[argument]) for argument in matrix.args)
    return Case(item.nodeid, _is_deep(item), item.nodeid.partition("[")[0], row)


def _is_deep(item: pytest.Item) -> bool:
    if item.get_closest_marker("quick") is not None:
        return False
    return item.nodeid.startswith(E2E) or item.get_closest_marker("deep") is not None


def _name(item: pytest.Item, argument: str, value: object) -> str:
    match value:
        case Enum():
            return value.name
        case None | str() | int() | float():
            return str(value)
        case tuple():
            return ", ".join(_name(item, argument, part) for part in value)
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    if not isinstance(name, str):
        raise pytest.UsageError(f"{item.nodeid}: {argument} of its matrix needs values with a name, not {value!r}")
    return name
