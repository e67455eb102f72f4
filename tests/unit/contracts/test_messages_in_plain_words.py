"""Sentences that the operator and the command show to people use plain words, as the documentation does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("operator/millstream_operator", "cli/millstream")
LEAST_WORDS = 4  # of a sentence; shorter strings are names and units
DIALECT = ("nobody", "beside", "told", "superfluous", "doomed", "so many", "brought about", "in the way")

# A plan's reasons are part of its stored record: another word gives new records other names, for no other gain.
IN_STORED_PLANS = ("the rest is for what nobody foresees",)


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """The string literals of a file that are sentences, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documented:
            continue
        if isinstance(node.value, str) and len(node.value.split()) >= LEAST_WORDS:
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_messages_use_plain_words(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in sentences(path)
        for word in DIALECT
        if re.search(rf"\b{word}\b", text.lower()) and not any(kept in text for kept in IN_STORED_PLANS)
    ]
    assert found == []
