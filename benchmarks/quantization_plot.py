"""Bytes against mean KL, one point per method and slice, as SVG. Pure."""

from __future__ import annotations

import math
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 760, 420, 70, 60, 520, 300
COLOURS = ("#0969da", "#cf222e", "#1a7f37")
LEAST_RATIO, MOST_RATIO = 0.2, 0.6
STYLE = "text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-size: 15px; font-weight: 600 }"


def svg(found: dict[str, Any]) -> str:
    """The picture, from the document of `benchmarks.quantization_quality`."""
    methods = found["methods"]
    slices = list(next(iter(methods.values()))["slices"])
    values = [one["mean_kl"] for method in methods.values() for one in method["slices"].values()]
    low, high = math.floor(math.log10(max(1e-7, min(values)))), math.ceil(math.log10(max(values)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 26, f"{found['model']}: what quantization costs, by slice", "title"),
        _text(LEFT, 44, "mean KL (nats a token, logarithmic) over bytes of the layers by those of 16 bits"),
    ]
    for exponent in range(low, high + 1):
        y = _down(10.0**exponent, low, high)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{PLOT_WIDTH}" stroke="#d0d7de"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{10.0**exponent:g}", anchor="end"))
    for ratio in (0.2, 0.3, 0.4, 0.5, 0.6):
        x = _across(ratio)
        parts.append(f'<path d="M{x:.1f} {TOP}v{PLOT_HEIGHT}" stroke="#d0d7de"/>')
        parts.append(_text(x, TOP + PLOT_HEIGHT + 18, f"{ratio:g}", anchor="middle"))
    for name, method in methods.items():
        x = _across(method["bytes_ratio"])
        heights = [_down(max(1e-7, one["mean_kl"]), low, high) for one in method["slices"].values()]
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(name)}</title></circle>'
            for y, colour in zip(heights, COLOURS, strict=False)
        ]
    for index, (name, colour) in enumerate(zip(slices, COLOURS, strict=False)):
        y = TOP + 12 + 18 * index
        parts.append(f'<circle cx="{LEFT + PLOT_WIDTH + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(_text(LEFT + PLOT_WIDTH + 26, y, name))
    parts += _labels(methods, low, high)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _labels(methods: dict[str, Any], low: int, high: int) -> list[str]:
    """Names beside the highest point of each method, moved down where they would cover another."""
    placed: list[tuple[float, float]] = []
    parts = []
    tops = {
        name: min(_down(max(1e-7, one["mean_kl"]), low, high) for one in method["slices"].values())
        for name, method in methods.items()
    }
    for name, y in sorted(tops.items(), key=lambda item: item[1]):
        x, at = _across(methods[name]["bytes_ratio"]) + 8, y
        while any(abs(x - left) < 90 and abs(at - height) < 14 for left, height in placed):
            at += 14
        placed.append((x, at))
        parts.append(_text(x, at + 4, name))
    return parts


def _across(ratio: float) -> float:
    return LEFT + PLOT_WIDTH * (ratio - LEAST_RATIO) / (MOST_RATIO - LEAST_RATIO)


def _down(value: float, low: int, high: int) -> float:
    return TOP + PLOT_HEIGHT * (high - math.log10(value)) / max(1, high - low)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
