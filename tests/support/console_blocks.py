"""The `console` blocks of the pages, as a reader would type them.

A block whose lines start with `$ ` has commands there and output in the other lines; any other block has commands
alone. A word after `console` says why a block needs more than a checkout: one of `MARKS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
# The word, and what a command of such a block starts with or contains, at least one of them.
MARKS = {
    "cluster": r"\b(kubectl|helm|millstream_operator)\b|^millstream plan .*--(kubeconfig|nodes)\b",
    "gpu": r"\bcuda\b|--device",
    "minutes": r"^make |^(\.venv/bin/)?python -m (hack|benchmarks|tests)\.|^pytest tests/soak"
    r"|^millstream (bench|tune-draft|quality|quantize .*--calibration)\b",
    "network": r"\bdocker (build|push)\b|^millstream (fetch|inspect) --(hugging-face|image)\b",
}
_FENCE = re.compile(
    r"^(?P<indent> *)```console(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_PROMPT = "$ "


@dataclass(frozen=True, slots=True)
class Command:
    """One command, its continued lines joined, and the lines that the page shows as its output."""

    text: str
    output: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page. `marks`: the words after `console`."""

    page: str
    line: int
    marks: tuple[str, ...]
    commands: tuple[Command, ...]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return the blocks of a page in order; `text` in place of the file's."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    blocks = []
    for fence in _FENCE.finditer(text):
        indent = len(fence["indent"])
        lines = [line[indent:] for line in fence["body"].splitlines()]
        number = text.count("\n", 0, fence.start()) + 1
        blocks.append(Block(page, number, tuple(fence["info"].split()), _commands(lines)))
    return blocks


def _commands(lines: list[str]) -> tuple[Command, ...]:
    has_prompts = any(line.startswith(_PROMPT) for line in lines)
    commands: list[Command] = []
    is_continued = False
    for line in lines:
        if is_continued or (line.startswith(_PROMPT) if has_prompts else line.strip() and not line.startswith("#")):
            words = line.removeprefix(_PROMPT) if not is_continued else line.lstrip()
            if is_continued:
                commands[-1] = Command(f"{commands[-1].text} {words.removesuffix(chr(92)).rstrip()}")
            else:
                commands.append(Command(words.removesuffix("\\").rstrip()))
            is_continued = line.endswith("\\")
        elif has_prompts and commands and line.strip():
            commands[-1] = Command(commands[-1].text, (*commands[-1].output, line.rstrip()))
    return tuple(commands)
