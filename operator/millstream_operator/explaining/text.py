"""Small pieces of a readable table: columns, bars, bytes. Works without colour and without Unicode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BAR_WIDTH = 34
WIDEST = 118
BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Style:
    """The terminal's abilities. Colour only emphasises; the words carry all information."""

    colour: bool = False
    unicode: bool = True
    width: int = WIDEST  # of a line of prose, in characters

    def bold(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}" if self.colour else text

    def dim(self, text: str) -> str:
        return f"{DIM}{text}{RESET}" if self.colour else text

    @property
    def dot(self) -> str:
        return " · " if self.unicode else " | "


def bar(share: float, style: Style, width: int = BAR_WIDTH) -> str:
    """Return `share` of 1 as a bar of fixed width; any share above 0 is visible."""
    filled = min(width, max(1 if share > 0 else 0, round(share * width)))
    full, empty = ("█", "░") if style.unicode else ("#", ".")
    return full * filled + empty * (width - filled)


def gigabytes(num_bytes: int) -> str:
    """Decimal, as GPUs are sold: `39.8 GB`, `0.27 GB`."""
    value = num_bytes / 1e9
    return f"{value:.1f} GB" if value >= 10 else f"{value:.2f} GB"


def dollars(milli_usd: int) -> str:
    return f"${milli_usd / 1000:,.2f}"


def columns(rows: Sequence[Sequence[str]], indent: int = 2, gap: int = 2) -> list[str]:
    """Return rows as aligned lines; the last column has no limit."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        " " * indent
        + "".join(f"{cell:<{width}}{' ' * gap}" for cell, width in zip(row, widths, strict=False))
        + row[-1]
        for row in rows
    ]
