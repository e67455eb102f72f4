"""A run as one SVG: the distributions of TTFT, ITL and E2E, and output tokens a second over time. Pure.

Drawn directly: four small panels do not justify a plotting library in the runtime's image. A distribution is shown as
its empirical CDF on a logarithmic axis, which includes every request, shows the tail and lets percentiles be read off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from millstream.bench.measure import percentile
from millstream.bench.report import LABELS

PANEL_WIDTH, PANEL_HEIGHT = 360, 190
LEFT, TOP, GAP_X, GAP_Y = 54, 84, 62, 74
WIDTH = LEFT + 2 * PANEL_WIDTH + GAP_X + 24
HEIGHT = TOP + 2 * PANEL_HEIGHT + GAP_Y + 50
MAX_POINTS = 400
PANELS = ("ttft_ms", "itl_ms", "e2e_ms")
MARKED = (50, 99)
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 } .small { font-size: 11px; fill: #57606a }
  .grid { stroke: #d0d7de; stroke-width: 1 } .frame { fill: none; stroke: #8c959f }
  .curve { fill: none; stroke: #0969da; stroke-width: 2 } .mark { stroke: #57606a; stroke-dasharray: 3 3 }
  .limit { stroke: #cf222e; stroke-width: 1.5 } .limit-text { fill: #cf222e; font-size: 11px }
"""


def svg(run: dict[str, Any]) -> str:
    """The whole picture, from a document of `report`."""
    summary, target = run["summary"], run["target"]
    hardware = str(run["environment"].get("hardware", ""))
    headline = (
        f"{summary['completed']} requests, {summary['requests_per_second']:.2f} requests/s, "
        f"{summary['output_tokens_per_second']:.0f} output tokens/s"
    )
    goodput = summary["goodput"]
    limits = goodput["objective"] if goodput else {}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 26, f"{target.get('model')}: {run['workload']['description']}", "title"),
        _text(LEFT, 46, headline + (f", {goodput['share']:.0%} within the objective" if goodput else "")),
        _text(LEFT, HEIGHT - 12, hardware, "small"),
    ]
    places = [
        (LEFT + column * (PANEL_WIDTH + GAP_X), TOP + row * (PANEL_HEIGHT + GAP_Y))
        for row in (0, 1)
        for column in (0, 1)
    ]
    for name, (x, y) in zip(PANELS, places, strict=False):
        parts += _distribution(name, samples(run, name), limits.get(name), x, y)
    parts += _over_time(run["output_tokens_per_second_over_time"], *places[3])
    return "\n".join([*parts, "</svg>"]) + "\n"


def samples(run: dict[str, Any], name: str) -> list[float]:
    """All values of one latency in milliseconds, ascending."""
    values: list[float] = []
    for row in run["requests"]:
        value = row.get(name)
        values += value if isinstance(value, list) else [value] if value is not None else []
    return sorted(values)


def decades(low: float, high: float) -> list[float]:
    """Ticks 1, 2, 5 × 10ⁿ from the last at or below `low` to the first at or above `high`."""
    ticks = [
        digit * 10.0**exponent
        for exponent in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        for digit in (1, 2, 5)
    ]
    first = max(index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    last = min(index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9) and index > first)
    return ticks[first : last + 1]


def labelled(ticks: Sequence[float]) -> list[float]:
    """The ticks that get a label: all of a few, else the powers of ten."""
    if len(ticks) <= 8:
        return list(ticks)
    return [tick for tick in ticks if abs(math.log10(tick) - round(math.log10(tick))) < 1e-9]


def _distribution(name: str, ordered: Sequence[float], limit: float | None, x: float, y: float) -> list[str]:
    positive = [max(value, 0.01) for value in ordered]
    parts = [_text(x, y - 8, f"{LABELS[name]}, ms (share of samples at or below)"), _frame(x, y)]
    if not positive:
        return [*parts, _text(x + 8, y + 20, "no samples", "small")]
    ticks = decades(positive[0], max(positive[-1], limit or 0.0))
    low, span = math.log10(ticks[0]), math.log10(ticks[-1] / ticks[0])

    def across(value: float) -> float:
        return x + PANEL_WIDTH * (math.log10(value) - low) / span

    for tick in labelled(ticks):
        parts += [_line(across(tick), y, across(tick), y + PANEL_HEIGHT, "grid")]
        parts += [_text(across(tick), y + PANEL_HEIGHT + 15, f"{tick:g}", "small", "middle")]
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(x - 6, y + PANEL_HEIGHT * (1 - share) + 4, f"{share:.0%}", "small", "end"))
    steps = [round(i * (len(positive) - 1) / MAX_POINTS) for i in range(MAX_POINTS + 1)]
    points = [(across(positive[i]), y + PANEL_HEIGHT * (1 - (i + 1) / len(positive))) for i in sorted(set(steps))]
    points.insert(0, (points[0][0], y + PANEL_HEIGHT))
    parts.append(f'<polyline class="curve" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
    for percent in MARKED:
        at = percentile(positive, percent)
        parts.append(_line(across(at), y, across(at), y + PANEL_HEIGHT, "mark"))
        shown = f"p{percent} {at:.0f}" if at >= 100 else f"p{percent} {at:.3g}"
        parts.append(_beside(across(at), x, y + (70 if percent == 50 else 130), shown, "small"))
    if limit is not None:
        parts.append(_line(across(limit), y, across(limit), y + PANEL_HEIGHT, "limit"))
        parts.append(_beside(across(limit), x, y + 14, f"≤ {limit:g}", "limit-text"))
    return parts


def _over_time(rate: dict[str, Any], x: float, y: float) -> list[str]:
    parts = [_text(x, y - 8, "output tokens/s over time, s"), _frame(x, y)]
    values, width = rate["values"], rate["bin_seconds"]
    if not values:
        return [*parts, _text(x + 8, y + 20, "no samples", "small")]
    top = decades(max(max(values), 1.0), max(max(values), 1.0) * 1.01)[-1]
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(x - 6, y + PANEL_HEIGHT * (1 - share) + 4, f"{top * share:g}", "small", "end"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = f"{share * width * len(values):.3g}"
        parts.append(_text(x + PANEL_WIDTH * share, y + PANEL_HEIGHT + 15, at, "small", "middle"))
    points = []
    for index, value in enumerate(values):
        level = y + PANEL_HEIGHT * (1 - value / top)
        points += [(x + PANEL_WIDTH * index / len(values), level), (x + PANEL_WIDTH * (index + 1) / len(values), level)]
    parts.append(f'<polyline class="curve" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
    return parts


def _beside(at: float, left: float, y: float, text: str, style: str) -> str:
    """A label right of a vertical line, or left of it where the panel ends."""
    at_the_end = at > left + 0.8 * PANEL_WIDTH
    return _text(at - 3 if at_the_end else at + 3, y, text, style, "end" if at_the_end else "start")


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _frame(x: float, y: float) -> str:
    return f'<rect x="{x}" y="{y}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" class="frame"/>'
