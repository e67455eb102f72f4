"""Both goals of the gaps between tokens are judged, in their own direction."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import long_prompt_latency, mixed_latency
from benchmarks.latency_goals import show


def gaps(before_ms: float, p50_ms: float, p99_ms: float) -> dict[str, float]:
    return {
        "median_before_seconds": before_ms / 1e3,
        "median_during_seconds": p50_ms / 1e3,
        "p99_during_seconds": p99_ms / 1e3,
    }


def test_a_long_prompt_is_judged_by_both_goals_at_both_targets(capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = {
        f"behind-{tokens}": {"bounded": gaps(3.0, 49.0, 60.0), "strict": gaps(3.0, 10.0, 11.9)}
        for tokens in long_prompt_latency.CONTEXTS_TOKENS
    }
    found = long_prompt_latency.judge(report)
    assert {one["what"]: (one["value"], one["goal"], one["reached"]) for one in found} == {
        "bounded, behind 32 tokens: ITL p99 over the typical gap": (20.0, 4.0, False),
        "bounded, behind 32 tokens: ITL p50, ms": (49.0, 50, True),
        "bounded, behind 512 tokens: ITL p50, ms": (49.0, 50, True),
        "strict, behind 32 tokens: ITL p99 over the typical gap": (3.967, 4.0, True),
        "strict, behind 32 tokens: ITL p50, ms": (10.0, 9.0, False),
        "strict, behind 512 tokens: ITL p50, ms": (10.0, 9.0, False),
    }
    show(found)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [
        "missed",
        "reached",
        "reached",
        "reached",
        "missed",
        "missed",
    ]


def test_mixed_clients_are_judged_by_both_goals() -> None:
    medians = {
        "baseline": {"itl_p50_ms": 7.0, "itl_p99_ms": 20.0},
        "here": {"itl_p50_ms": 7.0, "itl_p99_ms": 50.0},
        "target 5 ms": {"itl_p50_ms": 7.0, "itl_p99_ms": 28.0},
    }
    found = mixed_latency.judge(16, medians, {"here": 50, "target 5 ms": 5})
    assert [(one["what"], one["reached"]) for one in found] == [
        ("16 clients, here: ITL p99 over the typical gap", False),
        ("16 clients, here: ITL p50, ms", True),
        ("16 clients, target 5 ms: ITL p99 over the typical gap", True),
        ("16 clients, target 5 ms: ITL p50, ms", False),
    ]
