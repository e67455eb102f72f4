"""docs/architecture.md names real files in its lists, and the file that really defines each behaviour of its table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
LONGEST_WAY = 15
LEAST_BEHAVIOURS = 20


def section(title: str) -> str:
    """The text between a heading of the second level and the next one."""
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def files_of(title: str) -> list[str]:
    """The files of a numbered list, in order."""
    return re.findall(r"^\d+\. `([^`]+)` — \S", section(title), flags=re.MULTILINE)


BEHAVIOURS = re.findall(r"^\| ([^|`]*(?:`[^`]+`)?[^|`]*) \| `([^`]+)` \| `([^`]+)` \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("title", ["One request's way", "One manifest's way"])
def test_a_way_is_a_short_list_of_files_that_exist(title: str) -> None:
    files = files_of(title)
    assert 0 < len(files) <= LONGEST_WAY
    assert len(set(files)) == len(files)
    assert len(files) == len(re.findall(r"^\d+\. ", section(title), flags=re.MULTILINE))
    assert [path for path in files if not (ROOT / path).is_file()] == []


def test_the_table_has_enough_behaviours_and_each_once() -> None:
    names = [name for name, _, _ in BEHAVIOURS]
    rows = [line for line in section("Where is it decided?").splitlines() if line.startswith("| ")]
    assert len(names) == len(rows) - 1  # without the header
    assert len(names) >= LEAST_BEHAVIOURS
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("behaviour", "path", "symbol"), BEHAVIOURS, ids=[name for name, _, _ in BEHAVIOURS])
def test_the_file_defines_what_the_table_says(behaviour: str, path: str, symbol: str) -> None:
    file = ROOT / path
    assert file.is_file(), f"{behaviour}: {path}"
    assert symbol in symbols_of(file), f"{behaviour}: {path} does not define {symbol}"


def symbols_of(file: Path) -> set[str]:
    """The functions and classes that a module defines, and the methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_the_tree_names_folders_and_files_that_exist() -> None:
    missing = [path for path in tree_paths() if not (ROOT / path).exists()]
    assert missing == []


def tree_paths() -> list[str]:
    """Each entry of the drawn tree as a path from the root, by its indentation of four."""
    drawing = section("The tree").split("```")[1]
    paths, parents = [], [""]
    for line in filter(str.strip, drawing.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 4
        first, *others = re.split(r"\s{2,}", line.strip())
        names = [first, *(other for other in others if re.fullmatch(r"[\w-]+/", other))]
        if re.fullmatch(r"[\w./-]+", first):
            parents = [*parents[: depth + 1], parents[depth] + first]
            paths += [parents[depth] + name for name in names]
    return paths
