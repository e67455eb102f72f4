"""Every test that the index and SECURITY.md name exists, and the page has each class of vulnerabilities."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.security.index import HELD
from tests.unit.contracts.test_security_classes import PROOFS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/.]+\.py)::(\w+)`")  # on the page: beneath tests/unit, or with the folder
FOLDERS = ("tests/", "e2e/")


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page, without its head."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("attack", HELD)
def test_what_held_is_still_tried(attack: str) -> None:
    assert HELD[attack]
    for test in HELD[attack]:
        file, _, function = test.partition("::")
        assert function in functions_of(file), test


def test_the_page_names_tests_that_exist() -> None:
    named = NAMED.findall(PAGE)
    assert named
    for file, function in named:
        path = file if file.startswith(FOLDERS) else f"tests/unit/{file}"
        assert function in functions_of(path), f"{file}::{function}"


def test_the_page_has_a_row_for_each_attack_that_held() -> None:
    rows = {cells[0]: cells for cells in rows_of("What was attacked")}
    assert rows.keys() == HELD.keys()
    for attack, cells in rows.items():
        ((file, function),) = NAMED.findall(cells[-1])
        assert HELD[attack][0] in (f"{file}::{function}", f"tests/unit/{file}::{function}"), attack


def test_the_page_has_a_row_for_each_class_of_vulnerabilities() -> None:
    rows = {cells[0]: cells for cells in rows_of("Classes of published vulnerabilities")}
    assert rows.keys() == PROOFS.keys()
    for name, cells in rows.items():
        named = {f"{file}::{function}" for file, function in NAMED.findall(cells[-1])}
        assert named, name
        assert named <= {*PROOFS[name]}, name


def test_every_attacker_has_what_they_get_and_what_stops_them() -> None:
    rows = rows_of("Who attacks, what they get, what stops them")
    assert len(rows) >= 10
    for cells in rows:
        assert len(cells) == 3, cells
        assert all(cells), cells
