"""Draw a terminal picture (SVG) from the real output of a command.

    python -m hack.reference.terminal_picture "make demo" docs/pictures/demo.svg     # runs it
    python -m hack.reference.terminal_picture --from log.txt "make demo" docs/pictures/demo.svg

The command runs on a pseudo-terminal, so the picture shows what a person sees: carriage returns and cursor
movements are played back on a small screen model, colours stay. `--last N` keeps the last N lines.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 118
_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", help="the command line shown as the picture's first line, and run unless --from")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--from", dest="log", type=Path, help="a recorded terminal log to draw instead of running")
    parser.add_argument("--last", type=int, default=60, help="keep the last N lines (default: 60)")
    parser.add_argument("--skip-until", default="", help="drop the lines before the first that contains this text")
    options = parser.parse_args()
    raw = options.log.read_text() if options.log else run_on_a_terminal(options.command)
    lines = play_back(raw)
    first = next((i for i, line in enumerate(lines) if options.skip_until in line), 0)
    draw(options.command, lines[first:][-options.last :], options.svg)
    return 0


def run_on_a_terminal(command: str) -> str:
    """Run `command` in a shell on a pseudo-terminal; everything it printed, as one string."""
    captured = io.BytesIO()

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 65536)
        captured.write(chunk)
        return chunk

    os.environ.update(COLUMNS=str(COLUMNS), LINES="50", TERM="xterm-256color")
    status = pty.spawn(["/bin/bash", "-c", command], read)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"draw: {command!r} failed; nothing drawn.")
    return captured.getvalue().decode(errors="replace")


def play_back(raw: str) -> list[str]:
    """The lines that remain on a screen after `raw`: honours CR, LF, cursor up, erase line, erase below."""
    screen: list[str] = [""]
    row = 0
    for piece in re.split(r"(\r\n|\r|\n|\x1b\[[0-9;?]*[A-Za-z])", raw):
        if not piece:
            continue
        escape = _ESCAPE.fullmatch(piece)
        if piece in ("\n", "\r\n"):
            row += 1
            if row == len(screen):
                screen.append("")
        elif piece == "\r":
            screen[row] = screen[row] + "\r"  # the next text on this row replaces it
        elif escape and escape[2] == "A":
            row = max(0, row - int(escape[1] or 1))
        elif escape and escape[2] == "K":
            screen[row] = ""
        elif escape and escape[2] == "J":
            screen[row:] = [""]
        elif escape and escape[2] != "m":
            continue
        else:
            screen[row] = piece if screen[row].endswith("\r") else screen[row] + piece
    return [line.rstrip("\r") for line in screen]


def draw(command: str, lines: list[str], svg: Path) -> None:
    """Write the SVG: a prompt with the command, then the lines."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=False, overflow="fold")
    # No download address in the picture: viewers use the fonts that they have.
    text = console.export_svg(title=command, font_aspect_ratio=0.61)
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)
    svg.write_text(text.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas").rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main())
