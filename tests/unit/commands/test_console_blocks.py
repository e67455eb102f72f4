"""What the pages tell a reader to type does what they say: every `console` block that needs no more than a checkout."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.console_blocks import MARKS, PAGES, ROOT, Block, blocks_of
from tests.support.console_session import console_session

BLOCKS = {page: blocks_of(page) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
UNMARKED = {page: unmarked for page, blocks in BLOCKS.items() if (unmarked := [b for b in blocks if not b.marks])}


def commands_of(page: str) -> set[str]:
    """What a page has typed, without comments and the command's folder."""
    lines = (command.text for block in UNMARKED[page] for command in block.commands)
    return {re.sub(r"\s+# .*$", "", line).removeprefix(".venv/bin/") for line in lines}


# A page all of whose commands are another one's is not run again: each server takes ten CPU-seconds.
RUN = {
    page: blocks
    for page, blocks in UNMARKED.items()
    if not any(commands_of(page) < commands_of(other) for other in UNMARKED)
}


def test_every_block_is_read() -> None:
    """By another reading of the same files: a fence that is missed is a block that is never run."""
    fences = [line for page in PAGES for line in (ROOT / page).read_text(encoding="utf-8").splitlines()]
    assert len(ALL) == sum(line.lstrip().startswith("```console") for line in fences)
    assert all(block.commands for block in ALL)


def test_lines_are_commands_and_output_as_a_reader_takes_them() -> None:
    text = "```console\n$ first \\\n    --flag\nout 1\nout 2\n$ second\n```\n"
    text += "\n  ```console cluster\n  a   # why\n  b\n  ```\n"
    prompts, plain = blocks_of("README.md", text)
    assert [(one.text, one.output) for one in prompts.commands] == [
        ("first --flag", ("out 1", "out 2")),
        ("second", ()),
    ]
    assert [one.text for one in plain.commands] == ["a   # why", "b"]
    assert (prompts.marks, plain.marks, plain.line) == ((), ("cluster",), 9)


@pytest.mark.parametrize("block", [block for block in ALL if block.marks], ids=lambda block: block.place)
def test_a_block_that_is_not_run_needs_what_its_mark_says(block: Block) -> None:
    (mark,) = block.marks
    needs = re.compile(MARKS[mark])
    assert any(needs.search(command.text) for command in block.commands), "nothing in it needs that"
    could_run = [
        one.text for one in block.commands if one.text.startswith("millstream ") and not needs.search(one.text)
    ]
    assert could_run == [], "put these into a block without a mark"


def test_the_page_of_tests_lists_how_many_blocks_are_not_run() -> None:
    rows = re.findall(
        r"^\| `console (\w+)` \| [^|]+ \| (\d+) \|$", (ROOT / "docs/testing.md").read_text(), re.MULTILINE
    )
    assert {mark: int(count) for mark, count in rows} == Counter(block.marks[0] for block in ALL if block.marks)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_end_as_it_says(page: str, tmp_path: Path) -> None:
    with console_session(tmp_path) as session:
        for block in RUN[page]:
            session.run(block)
