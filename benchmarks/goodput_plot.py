"""Goodput over decoding without drafts, by requests at once: a panel per acceptance, a line per number of drafts, and
the governor as points. As SVG. Pure."""

from __future__ import annotations

import math
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT, GAP = 760, 390, 52, 84, 150, 240, 22
COLOURS = ("#9ec5f4", "#5598e0", "#1f66b8", "#0a3a75")  # of the lengths, ascending
GOVERNOR = "#cf222e"
LEAST, MOST = 0.25, 5.0
STYLE = "text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-size: 15px; font-weight: 600 }"
Cells = list[dict[str, Any]]


def svg(found: dict[str, Any]) -> str:
    """The picture, from the document of `benchmarks.goodput`."""
    cells: Cells = found["cells"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, "Tokens per second over those without drafts, by requests at once", "title"),
        _text(LEFT, 42, f"simulated; step times {found['step_times']}"),
        *_legend([*cells[0]["ratios"]]),
    ]
    for place, acceptance in enumerate(dict.fromkeys(one["acceptance"] for one in cells)):
        parts += _panel(place, acceptance, [one for one in cells if one["acceptance"] == acceptance])
    parts.append(_text(LEFT + 2 * PANEL_WIDTH + 1.5 * GAP, HEIGHT - 12, "requests at once", anchor="middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(lengths: list[str]) -> list[str]:
    parts, x, y = [], float(LEFT), 58
    for length, colour in zip(lengths, COLOURS, strict=True):
        parts.append(f'<path d="M{x:.1f} {y - 4}h18" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(_text(x + 24, y, f"{length} draft" if length == "1" else f"{length} drafts"))
        x += 88
    parts.append(f'<circle cx="{x + 9:.1f}" cy="{y - 4}" r="4.5" fill="none" stroke="{GOVERNOR}" stroke-width="2"/>')
    parts.append(_text(x + 24, y, f"governor, up to {lengths[-1]}"))
    return parts


def _panel(place: int, acceptance: float, cells: Cells) -> list[str]:
    left = LEFT + place * (PANEL_WIDTH + GAP)
    batches = [one["batch"] for one in cells]
    parts = [
        _text(left + PANEL_WIDTH / 2, TOP - 6, f"{acceptance:.0%} of drafts stand".replace("%", " %"), anchor="middle")
    ]
    for ratio in (0.25, 0.5, 1.0, 2.0, 4.0):
        width, colour = (1.5, "#6e7781") if ratio == 1.0 else (1.0, "#d0d7de")
        parts.append(f'<path d="M{left} {_down(ratio):.1f}h{PANEL_WIDTH}" stroke="{colour}" stroke-width="{width}"/>')
        if not place:
            parts.append(_text(left - 8, _down(ratio) + 4, f"{ratio:g}", anchor="end"))
    for batch in batches:
        x = _across(left, batch, batches)
        parts.append(_text(x, TOP + PANEL_HEIGHT + 18, str(batch), anchor="middle"))
    for length, colour in zip(cells[0]["ratios"], COLOURS, strict=True):
        points = " ".join(
            f"{_across(left, one['batch'], batches):.1f},{_down(one['ratios'][length]):.1f}" for one in cells
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for one in cells:
        x, y = _across(left, one["batch"], batches), _down(one["governor"])
        title = f"{one['governor']:.2f} with {one['governor_drafts_per_decode']:.1f} drafts per decode"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="none" stroke="{GOVERNOR}" stroke-width="2">'
            f"<title>{escape(title)}</title></circle>"
        )
    return parts


def _across(left: float, batch: int, batches: list[int]) -> float:
    inset = 10
    return left + inset + (PANEL_WIDTH - 2 * inset) * batches.index(batch) / max(1, len(batches) - 1)


def _down(ratio: float) -> float:
    share = math.log(min(MOST, max(LEAST, ratio)) / LEAST) / math.log(MOST / LEAST)
    return TOP + PANEL_HEIGHT * (1 - share)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
