"""The recipes of CONTRIBUTING.md name files and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECIPES = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Recipes")[1].split("\n## ")[0]
CODE = re.findall(r"`([^`\s]+)`", RECIPES)


@pytest.mark.parametrize("path", sorted({one for one in CODE if "/" in one and "::" not in one}))
def test_a_file_of_a_recipe_exists(path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / "tests" / "unit" / path).exists()


@pytest.mark.parametrize("test", sorted({one for one in CODE if "::" in one}))
def test_a_test_of_a_recipe_exists(test: str) -> None:
    path, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / "tests" / "unit" / path).read_text(encoding="utf-8")


def test_every_step_has_a_test() -> None:
    rows = [line.strip("|").split("|") for line in RECIPES.splitlines() if line.startswith("| ") and "`" in line]
    without = [file.strip() for file, _, test in rows if "::" not in test]
    # Nothing is forgotten where a reason of the runtime is not needed.
    assert without == ["`runtime/millstream_runtime/errors.py`"]
