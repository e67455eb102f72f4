"""The verdict and the figures of each slice in at most 4 KiB: what a container's termination message holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

VERSION = 1
MAX_BYTES = 4096  # of a container's termination message
MAX_FAILURE_CHARACTERS = 160
FIGURES = ("mean_kl", "p99_kl", "top1_agreement_percent", "flip_percent", "perplexity_ratio")


def summary(report: Mapping[str, Any]) -> str:
    """Return one line of JSON. `report`: of `report.build`. Slices that failed come first; what does not fit is left
    out, and counted by `slices_left_out`. A figure that is not finite is null."""
    slices = sorted(report["slices"], key=lambda one: not one["failures"])
    kept = [_slice(one) for one in slices]
    while True:
        line = _line(report["verdict"], kept, len(slices) - len(kept))
        if len(line.encode()) <= MAX_BYTES or not kept:
            return line
        kept.pop()


def _line(verdict: str, slices: list[dict[str, Any]], left_out: int) -> str:
    return json.dumps(
        {"version": VERSION, "event": "judged", "verdict": verdict, "slices": slices, "slices_left_out": left_out},
        ensure_ascii=False,
    )


def _slice(one: Mapping[str, Any]) -> dict[str, Any]:
    figures = one["figures"]
    return {
        "slice": figures["slice"],
        "documents": figures["num_documents"],
        "tokens": figures["num_tokens"],
        **{name: _rounded(figures[name]["value"]) for name in FIGURES},
        "failures": [words[:MAX_FAILURE_CHARACTERS] for words in one["failures"]],
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
