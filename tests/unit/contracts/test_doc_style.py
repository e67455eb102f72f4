"""The pages are wrapped alike, and use the field's words: see docs/glossary.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GENERATED = {"api.md", "chart.md"}
PAGES = ["README.md", "CHANGELOG.md", "SECURITY.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
WRITTEN = sorted(page for page in PAGES if Path(page).name not in GENERATED)
WIDTH = 120
# Words that this project once used in a sense of its own, or where a sentence should say who does what.
DIALECT = (
    "nobody",
    "beside",
    "told",
    "tells",
    "superfluous",
    "doomed",
    "deed",
    "so many",
    "of its own accord",
    "brought about",
    "in the way",
    "by hand",
)


def prose(page: str) -> list[str]:
    """The lines of paragraphs and lists: no code, tables, comments, headings or pictures."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for line in text.splitlines() if not line.startswith(("|", "#", "!", "<"))]


@pytest.mark.parametrize("page", WRITTEN)
def test_prose_is_wrapped_at_one_width(page: str) -> None:
    assert [line for line in prose(page) if len(line) > WIDTH and can_be_broken(line)] == []


def can_be_broken(line: str) -> bool:
    """Code and links are kept whole, so a line of one of them may be longer."""
    return len(re.sub(r"`[^`]*`|\]\([^)]*\)", "_", line).split()) > 2


@pytest.mark.parametrize("page", WRITTEN)
def test_a_page_uses_plain_words(page: str) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    words = " ".join(text.lower().split())
    assert [word for word in DIALECT if re.search(rf"\b{word}\b", words)] == []
