"""Each promise of the README has a quick test, and a mutation that this test has to notice."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutations.promises import PROMISES

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## What it promises\n")[1].split("\n## ")[0]
ROWS = [line for line in SECTION.splitlines() if line.startswith("| ") and not line.startswith("| promise ")]
ROW = re.compile(r"\| (?P<promise>[^|]+) \| `(?P<test>[\w./-]+\.py::\w+)` \|")
TESTS = [match["test"] for row in ROWS if (match := ROW.fullmatch(row))]
IMPLEMENTATIONS = ("operator/", "runtime/", "kernels/", "cli/", "charts/", "crds/")
LEAST_PROMISES = 25


def test_every_row_is_a_promise_with_one_test() -> None:
    assert [row for row in ROWS if not ROW.fullmatch(row)] == []
    assert len(TESTS) >= LEAST_PROMISES
    assert len(set(TESTS)) == len(TESTS)


@pytest.mark.parametrize("test", TESTS)
def test_a_promise_has_a_quick_test(test: str) -> None:
    file, _, name = test.partition("::")
    module = ast.parse((ROOT / "tests" / "unit" / file).read_text(encoding="utf-8"))
    assert is_quick(module, name)


def test_every_promise_has_a_mutation_of_what_keeps_it() -> None:
    """`python -m tests.mutations` checks that this test kills it, and that the quick tier has the case that does."""
    assert [mutation.tests for mutation in PROMISES] == [(f"tests/unit/{test}",) for test in TESTS]
    assert [mutation.file for mutation in PROMISES if not mutation.file.startswith(IMPLEMENTATIONS)] == []


MODULES = {
    "": True,
    "pytestmark = pytest.mark.deep": False,
    "pytestmark = [pytest.mark.deep, pytest.mark.timeout(9)]": False,
    "pytestmark = pytest.mark.timeout(9)": True,
}
FUNCTIONS = {
    "def test_it(): ...": None,  # as its module
    "@pytest.mark.deep\ndef test_it(): ...": False,
    "@pytest.mark.quick\ndef test_it(): ...": True,
    "@pytest.mark.matrix('a')\n@pytest.mark.deep()\nasync def test_it(): ...": False,
    "@pytest.mark.quick\n@pytest.mark.parametrize('a', [1])\nasync def test_it(a): ...": True,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("module", MODULES)
def test_marks_decide_what_is_quick(module: str, function: str) -> None:
    expected = MODULES[module] if FUNCTIONS[function] is None else FUNCTIONS[function]
    assert is_quick(ast.parse(f"import pytest\n{module}\n{function}"), "test_it") is expected
    with pytest.raises(LookupError, match="test_other"):
        is_quick(ast.parse(function), "test_other")


def is_quick(module: ast.Module, name: str) -> bool:
    """Whether the quick tier runs a test of a file below tests/unit: it is not `deep`, or `quick` all the same.

    The marks are read from the source: collecting the tests would import half of the project.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = next((node for node in module.body if isinstance(node, functions) and node.name == name), None)
    if found is None:
        raise LookupError(f"there is no {name}")
    own = {mark for decorator in found.decorator_list for mark in marks_in(decorator)}
    of_file = {mark for node in module.body if is_pytestmark(node) for mark in marks_in(node)}
    return "quick" in own or "deep" not in own | of_file


def is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(one, ast.Name) and one.id == "pytestmark" for one in node.targets
    )


def marks_in(node: ast.AST) -> set[str]:
    """The names behind `pytest.mark.`."""
    attributes = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
    return {one.attr for one in attributes if isinstance(one.value, ast.Attribute) and one.value.attr == "mark"}
