"""One run as a document (`--json`) and as a table. Pure.

The document is what `plot` and `compare` read: latencies in milliseconds, everything else in the unit of its name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from millstream.bench.measure import PERCENTILES, Distribution, Measurement, Objective, RequestRecord
from millstream.bench.workload import PlannedRequest, WorkloadSpec, fingerprint

SCHEMA = "millstream-bench/1"
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
LABELS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E", "client_delay_ms": "client delay"}
MAX_ERRORS_SHOWN = 5
RATE_BINS = 40


def document(
    *,
    mode: str,
    target: dict[str, Any],
    spec: WorkloadSpec,
    requests: Sequence[PlannedRequest],
    records: Sequence[RequestRecord],
    measured: Measurement,
    objective: Objective | None,
    environment: dict[str, Any],
    created: str,
    interrupted: bool,
) -> dict[str, Any]:
    """Everything about a run. `target` says what was measured; equal loads have the same `workload.fingerprint`."""
    ordered = sorted(records, key=lambda record: record.index)
    return {
        "schema": SCHEMA,
        "mode": mode,
        "created": created,
        "interrupted": interrupted,
        "target": target,
        "workload": {
            **spec.as_dict(),
            "num_requests": len(requests),
            "description": spec.describe(),
            "fingerprint": fingerprint(requests),
        },
        "environment": environment,
        "summary": _summary(measured, objective),
        "errors": dict(Counter(record.error for record in ordered if record.error is not None)),
        "output_tokens_per_second_over_time": rate_over_time(ordered),
        "requests": [_row(record) for record in ordered],
    }


def _summary(measured: Measurement, objective: Objective | None) -> dict[str, Any]:
    good = None
    if objective is not None and measured.good is not None:
        good = {
            "objective": objective.limits_ms,
            "requests": measured.good,
            "requests_per_second": _rounded(measured.goodput_requests_per_second or 0.0),
            "share": _rounded(measured.good / max(1, measured.completed + measured.failed)),
        }
    return {
        "completed": measured.completed,
        "failed": measured.failed,
        "unfinished": measured.unfinished,
        "duration_seconds": _rounded(measured.duration_seconds),
        "prompt_tokens": measured.prompt_tokens,
        "completion_tokens": measured.completion_tokens,
        "tokens_per_chunk": _rounded(measured.tokens_per_chunk),
        "requests_per_second": _rounded(measured.requests_per_second),
        "output_tokens_per_second": _rounded(measured.output_tokens_per_second),
        "total_tokens_per_second": _rounded(measured.total_tokens_per_second),
        "goodput": good,
        "ttft_ms": _milliseconds(measured.ttft),
        "itl_ms": _milliseconds(measured.itl),
        "tpot_ms": _milliseconds(measured.tpot),
        "e2e_ms": _milliseconds(measured.e2e),
        "client_delay_ms": _milliseconds(measured.client_delay),
    }


def _milliseconds(distribution: Distribution) -> dict[str, float]:
    return {
        "count": distribution.count,
        "mean": _rounded(distribution.mean * 1e3),
        **{f"p{percent}": _rounded(value * 1e3) for percent, value in distribution.percentiles.items()},
    }


def _row(record: RequestRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"index": record.index, "arrival_seconds": _rounded(record.arrival_seconds, 7)}
    if not record.complete:
        return {**row, "error": record.error or "unfinished"}
    tpot = record.tpot_seconds
    return {
        **row,
        "client_delay_ms": _rounded(record.client_delay_seconds * 1e3),
        "ttft_ms": _rounded(record.ttft_seconds * 1e3),
        "tpot_ms": None if tpot is None else _rounded(tpot * 1e3),
        "e2e_ms": _rounded(record.e2e_seconds * 1e3),
        "itl_ms": [_rounded(gap * 1e3) for gap in record.itl_seconds],
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
    }


def rate_over_time(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Output tokens per second in equal bins of the run. A request's counted tokens are spread over its chunks."""
    done = [record for record in records if record.complete]
    end = max((record.chunk_seconds[-1] for record in done), default=0.0)
    if end <= 0:
        return {"bin_seconds": 0.0, "values": []}
    width = end / RATE_BINS
    bins = [0.0] * RATE_BINS
    for record in done:
        share = record.completion_tokens / len(record.chunk_seconds)
        for at in record.chunk_seconds:
            bins[min(RATE_BINS - 1, int(at / width))] += share
    return {"bin_seconds": _rounded(width), "values": [_rounded(tokens / width) for tokens in bins]}


def table(run: dict[str, Any]) -> str:
    """The document as text."""
    summary = run["summary"]
    target = " ".join(str(run["target"][key]) for key in ("model", "at") if run["target"].get(key))
    lines = [f"millstream bench {run['mode']} · {target} · {run['workload']['description']}", ""]
    if run["interrupted"]:
        lines += ["  Interrupted: the figures cover only the completed requests.", ""]
    lines += _counts(summary)
    lines += ["", _columns("milliseconds", ["mean", *(f"p{percent}" for percent in PERCENTILES)])]
    for name in (*LATENCIES, "client_delay_ms"):
        values = [summary[name]["mean"], *(summary[name][f"p{percent}"] for percent in PERCENTILES)]
        shown = [f"{value:.2f}" for value in values] if summary[name]["count"] else ["-"] * len(values)
        lines.append(_columns(LABELS[name], shown))
    if summary["tokens_per_chunk"] > 1.05:
        chunk = f"{summary['tokens_per_chunk']:.2f}"
        lines += [
            "",
            f"  The server sent {chunk} tokens per chunk on average: ITL is between chunks, TPOT between tokens.",
        ]
    if run["errors"]:
        lines += ["", "  errors"]
        for error, count in Counter(run["errors"]).most_common(MAX_ERRORS_SHOWN):
            lines.append(f"  {count:>7} × {error}")
    return "\n".join(lines)


def _counts(summary: dict[str, Any]) -> list[str]:
    cut = f"   {summary['unfinished']} unfinished" if summary["unfinished"] else ""
    lines = [
        f"  requests      {summary['completed']:,} completed   {summary['failed']:,} failed{cut}   "
        f"in {summary['duration_seconds']:.2f} s",
        f"  tokens        {summary['prompt_tokens']:,} in   {summary['completion_tokens']:,} out   (from usage)",
        f"  throughput    {summary['requests_per_second']:.2f} requests/s   "
        f"{summary['output_tokens_per_second']:,.1f} output tokens/s   "
        f"{summary['total_tokens_per_second']:,.1f} total tokens/s",
    ]
    if good := summary["goodput"]:
        limits = Objective(good["objective"]).describe()
        rate = f"{good['requests_per_second']:.2f} requests/s ({good['share']:.0%} of requests)"
        lines.append(f"  goodput       {rate}   {limits}")
    return lines


def _columns(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<13}" + "".join(f"{cell:>11}" for cell in cells)


def to_json(run: dict[str, Any]) -> str:
    """JSON that is readable at the top, with one line per request."""
    rows = [json.dumps(row, separators=(",", ":")) for row in run["requests"]]
    head = json.dumps({**run, "requests": []}, indent=2, allow_nan=False)
    return head.replace('"requests": []', '"requests": [\n    ' + ",\n    ".join(rows) + "\n  ]") + "\n"


def _rounded(value: float, decimals: int = 4) -> float:
    """Four decimals are tenths of a microsecond for milliseconds; a time in seconds needs seven for the same."""
    return round(value, decimals) if math.isfinite(value) else 0.0
