"""What the gaps between tokens may be while prompts enter: two goals, each judged and printed.

ratio     the 99th percentile of the gaps is at most 4 times the typical gap: that of the same answers before the prompt
          came, or their median
target    the median of the gaps is at most the target of the inter-token latency
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_RATIO = 4.0

Goal = dict[str, Any]


def ratio_goal(where: str, p99_ms: float, typical_ms: float) -> Goal:
    """Of gaps in milliseconds."""
    return _goal(f"{where}: ITL p99 over the typical gap", p99_ms / max(typical_ms, 1e-9), MOST_RATIO)


def target_goal(where: str, p50_ms: float, target_ms: float) -> Goal:
    """Of gaps in milliseconds."""
    return _goal(f"{where}: ITL p50, ms", p50_ms, target_ms)


def show(goals: Sequence[Goal]) -> None:
    """Print each, and whether it is reached."""
    for one in goals:
        said = "reached" if one["reached"] else "missed"
        print(f"  {one['what']:72} {one['value']:8.2f}   goal <= {one['goal']:g}   {said}", flush=True)


def _goal(what: str, value: float, bound: float) -> Goal:
    return {"what": what, "value": round(value, 3), "goal": bound, "reached": value <= bound}
