"""The table of docs/gateway.md, from the saved results."""

from __future__ import annotations

from typing import Any

COLUMNS = {
    "cached, to RoundRobin's": "cached_over_round_robin",
    "cached, three pickers to one": "cached_of_three_over_one",
    "TTFT p95, to RoundRobin's": "p95_over_round_robin",
    "the same, three pickers": "p95_of_three_over_round_robin",
    "TTFT p95, to LeastRequests'": "p95_over_least_requests",
    "most loaded replica, to the mean": "most_loaded",
    "regret": "regret",
    "regret, three pickers": "regret_of_three",
}


def table(results: list[dict[str, Any]]) -> str:
    """Return the rows, with a header, as Markdown."""
    lines = [f"| scenario | seeds | {' | '.join(COLUMNS)} |", f"|---|{'---|' * (1 + len(COLUMNS))}"]
    for result in results:
        cells = [_cell(name, result[name]) for name in COLUMNS.values()]
        lines.append(f"| {result['scenario']} | {result['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name.startswith("regret") else f"{value:.2f}"
