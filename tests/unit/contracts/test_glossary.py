"""docs/glossary.md: 30 to 50 terms, sorted, one line each, and linked from where readers begin."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|")][2:]  # after header and ruler
LONGEST_LINE = 140


def test_the_glossary_has_a_size_that_people_read() -> None:
    assert 30 <= len(ROWS) <= 50


def test_each_term_has_one_line_with_its_meaning() -> None:
    entries = [[cell.strip() for cell in row.strip("|").split("|")] for row in ROWS]
    assert all(len(entry) == 2 and all(entry) for entry in entries)
    assert [row for row in ROWS if len(row) > LONGEST_LINE] == []


def test_the_terms_are_sorted_and_each_is_there_once() -> None:
    terms = [re.split(r"\s*\|\s*", row)[1].casefold() for row in ROWS]
    assert terms == sorted(set(terms))


def test_the_glossary_is_linked_from_the_readme_and_the_list_of_pages() -> None:
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(glossary.md)" in (ROOT / "docs/README.md").read_text(encoding="utf-8")
