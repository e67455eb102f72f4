"""No file of the repository holds the marks of a merge conflict."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OURS, BETWEEN, THEIRS = (mark * 7 for mark in "<=>")  # written so that this file holds none


def unresolved_lines(text: str) -> list[int]:
    """The numbers of lines where a conflict begins. A heading underlined by signs of equality is none."""
    begins, found, is_between = 0, [], False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(f"{OURS} "):
            begins, is_between = number, False
        elif line == BETWEEN and begins:
            is_between = True
        elif line.startswith(f"{THEIRS} ") and is_between:
            found.append(begins)
            begins, is_between = 0, False
    return found


def test_no_tracked_file_holds_marks_of_a_merge() -> None:
    # git looks for files that have the first mark at all, binary ones left out: there is next to nothing to read then.
    command = ["git", "grep", "--name-only", "-z", "-I", "-e", f"^{OURS} "]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert listed.returncode in (0, 1), listed.stderr
    names = [name for name in listed.stdout.split("\0") if name]
    found = {name: unresolved_lines((ROOT / name).read_text(encoding="utf-8")) for name in names}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a", f"{OURS} HEAD", "b", BETWEEN, "c", f"{THEIRS} branch"], [2]),
        ([f"{OURS} HEAD", "b", f"||{'|' * 5} base", "x", BETWEEN, f"{THEIRS} branch"] * 2, [1, 7]),
        ([f"{OURS} HEAD", "b", f"{THEIRS} branch"], []),
        (["Heading", BETWEEN, f"{THEIRS} quoted"], []),
        ([f"text {OURS} HEAD", BETWEEN, f"{THEIRS} branch"], []),
    ],
)
def test_a_conflict_has_its_three_marks_in_order(lines: list[str], expected: list[int]) -> None:
    assert unresolved_lines("\n".join(lines)) == expected
