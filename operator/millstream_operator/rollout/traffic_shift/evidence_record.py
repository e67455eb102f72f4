"""The evidence of a staged shift as text, for an annotation of the revision's record. Pure.

Compact JSON: a pod's counters are a list, and the bounds of histograms stand once. A text that the operator cannot have
written counts as absent: then the evidence begins anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from millstream_operator.rollout.traffic_shift.evidence import (
    GOOD_ODDS,
    GOOD_RATES,
    WORSE_ODDS,
    Evidence,
    Logs,
    PodCounters,
    StageEvidence,
)
from millstream_operator.workloads.traffic import Histogram, Traffic

FORMAT = 1
MAX_CHARACTERS = 64_000
HISTOGRAMS = ("token_times", "prompt_tokens", "max_tokens")


def evidence_text(evidence: Evidence) -> str:
    """Return the text; the same evidence gives the same text."""
    bounds: list[tuple[float, ...]] = []
    stage = evidence.stage
    found = {
        "format": FORMAT,
        "pods": {
            uid: [one.restarts, None if one.traffic is None else _traffic(one.traffic, bounds)]
            for uid, one in sorted(evidence.pods.items())
        },
        "new": _traffic(evidence.new, bounds),
        "old": _traffic(evidence.old, bounds),
        "counts": [evidence.new_restarts, evidence.old_restarts, evidence.passed],
        "logs": [_rounded(logs) for logs in (evidence.errors, evidence.at_limit, evidence.restarts)],
        "unproven": [*evidence.unproven],
        "stage": None
        if stage is None
        else [
            stage.percent,
            _traffic(stage.new, bounds),
            _traffic(stage.old, bounds),
            _rounded(stage.few_errors),
            _rounded(stage.like_the_old),
            round(stage.waited_seconds, 1),
        ],
    }
    found["bounds"] = [[edge for edge in edges if not math.isinf(edge)] for edges in bounds]
    return json.dumps(found, separators=(",", ":"))


def read_evidence(text: str | None) -> Evidence | None:
    """Return the evidence; None for a text that the operator cannot have written."""
    if text is None or len(text) > MAX_CHARACTERS:
        return None
    try:
        return _read(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        return None


def _read(stored: Any) -> Evidence | None:
    if stored["format"] != FORMAT:
        return None
    bounds = [(*map(_number, edges), math.inf) for edges in stored["bounds"]]
    errors, at_limit, restarts = (_logs(logs, len(WORSE_ODDS)) for logs in stored["logs"])
    new_restarts, old_restarts, passed = map(int, stored["counts"])
    return Evidence(
        {
            str(uid): PodCounters(None if traffic is None else _traffic_of(traffic, bounds), int(count))
            for uid, (count, traffic) in stored["pods"].items()
        },
        _traffic_of(stored["new"], bounds),
        _traffic_of(stored["old"], bounds),
        new_restarts,
        old_restarts,
        errors,
        at_limit,
        restarts,
        None if stored["stage"] is None else _stage_of(stored["stage"], bounds),
        passed,
        tuple(map(int, stored["unproven"])),
    )


def _stage_of(stored: Sequence[Any], bounds: Sequence[tuple[float, ...]]) -> StageEvidence:
    percent, new, old, few_errors, like_the_old, waited_seconds = stored
    return StageEvidence(
        int(percent),
        _traffic_of(new, bounds),
        _traffic_of(old, bounds),
        _logs(few_errors, len(GOOD_RATES)),
        _logs(like_the_old, len(GOOD_ODDS)),
        _number(waited_seconds),
    )


def _traffic(traffic: Traffic, bounds: list[tuple[float, ...]]) -> list[Any]:
    found: list[Any] = []
    for one in fields(Traffic):
        value = getattr(traffic, one.name)
        if one.name not in HISTOGRAMS:
            found.append(value)
            continue
        if value.edges not in bounds:
            bounds.append(value.edges)
        found.append([bounds.index(value.edges), *value.counts])
    return found


def _traffic_of(stored: Sequence[Any], bounds: Sequence[tuple[float, ...]]) -> Traffic:
    found: dict[str, Any] = {}
    for one, value in zip(fields(Traffic), stored, strict=True):
        if one.name in HISTOGRAMS:
            edges, counts = bounds[value[0]], tuple(map(_count, value[1:]))
            found[one.name] = Histogram(edges, counts) if counts else Histogram()
            if counts and len(edges) != len(counts):
                raise ValueError("a histogram has as many counts as bounds")
        else:
            found[one.name] = _number(value) if one.name.endswith("_seconds") else _count(value)
    return Traffic(**found)


def _rounded(logs: Logs) -> list[float]:
    return [round(max(-1e6, min(1e6, log)), 6) for log in logs]


def _logs(stored: Sequence[Any], size: int) -> Logs:
    found = tuple(map(float, stored))
    if len(found) != size or not all(map(math.isfinite, found)):
        raise ValueError("evidence is one finite number per alternative")
    return found


def _number(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found) or found < 0:
        raise ValueError("a counter is finite and not negative")
    return found


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a counter is a whole number and not negative")
    return value
