"""Compare two saved runs: B over A per metric, or the reason why they are not comparable. Pure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from millstream.bench.report import LABELS, LATENCIES, SCHEMA
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure

THROUGHPUTS = ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second")
SHOWN = ("mean", "p50", "p99")
MAX_DOCUMENT_BYTES = 1 << 30
PARTS = ("workload", "target", "environment", "summary")
WORKLOAD_FIELDS = ("description", "num_requests", "fingerprint")


def read(path: Path) -> dict[str, Any]:
    """A document that `--json` wrote.

    Raises:
        InvalidConfigError: it is not one.
    """
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise InvalidConfigError(f"{path} is larger than {MAX_DOCUMENT_BYTES} bytes.")
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfigError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        run = None
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise InvalidConfigError(f"{path} is not a result of `millstream bench … --json` ({SCHEMA}).")
    if not all(isinstance(run.get(part), dict) for part in PARTS) or not _has_figures(run):
        raise InvalidConfigError(f"{path} is incomplete; run `millstream bench … --json` again.")
    return run


def _has_figures(run: dict[str, Any]) -> bool:
    """Whether everything is there that a comparison reads, and has its type."""
    summary, goodput = run["summary"], run["summary"].get("goodput")
    numbers = [summary.get(name) for name in (*THROUGHPUTS, "failed", "completion_tokens")]
    for name in LATENCIES:
        latency = summary.get(name)
        numbers += [latency.get(part) for part in ("count", *SHOWN)] if isinstance(latency, dict) else [None]
    if goodput is not None:
        numbers.append(goodput.get("requests_per_second") if isinstance(goodput, dict) else None)
    are_numbers = all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)
    return are_numbers and set(WORKLOAD_FIELDS) <= set(run["workload"]) and "interrupted" in run


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Why the two runs are not comparable; empty if they had the same workload."""
    ours, theirs = first["workload"], second["workload"]
    found = [
        f"{name} {ours.get(name)} against {theirs.get(name)}"
        for name in ours
        if name not in ("fingerprint", "description") and ours.get(name) != theirs.get(name)
    ]
    if not found and ours["fingerprint"] != theirs["fingerprint"]:
        found = ["the requests themselves differ"]
    asked = [run["target"].get("asked") for run in (first, second)]
    if asked[0] != asked[1]:
        found.append(f"parameters {asked[0]} against {asked[1]}")
    return found


def remarks(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Other differences, which may be what is compared and so are no reason to refuse."""
    notes = []
    for label, place in (
        ("model", ("target", "model")),
        ("mode", ("mode",)),
        ("hardware", ("environment", "hardware")),
    ):
        left, right = (_at(run, place) for run in (first, second))
        if left != right:
            notes.append(f"{label}: {left} against {right}")
    for name, run in (("A", first), ("B", second)):
        summary = run["summary"]
        if run["interrupted"]:
            notes.append(f"{name} was interrupted")
        if summary["failed"]:
            notes.append(f"{name} has {summary['failed']} failed requests")
    outs = [run["summary"]["completion_tokens"] for run in (first, second)]
    if outs[0] != outs[1]:
        notes.append(f"output tokens: {outs[0]} against {outs[1]} (answers may end early without ignore_eos)")
    return notes


def ratios(first: dict[str, Any], second: dict[str, Any]) -> dict[str, float | None]:
    """B / A by metric name such as `ttft_ms.p99`; None where A is 0."""
    values = [_flat(run["summary"]) for run in (first, second)]
    return {name: values[1][name] / value if value else None for name, value in values[0].items() if name in values[1]}


def table(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The comparison as text.

    Raises:
        RuntimeFailure: the runs had different workloads.
    """
    if reasons := differences(first, second):
        raise RuntimeFailure(
            FailureReason.BENCHMARK_FAILED,
            f"A and B ran different workloads and cannot be compared: {'; '.join(reasons)}.",
        )
    left, right, ratio = _flat(first["summary"]), _flat(second["summary"]), ratios(first, second)
    lines = [f"{first['workload']['description']}, {first['workload']['num_requests']} requests", ""]
    lines += [f"  {'':<28}{'A':>12}{'B':>12}{'B / A':>9}"]
    for name, value in ratio.items():
        better = _verdict(name, value)
        shown = f"{value:.3f}" if value is not None else "-"
        lines.append(f"  {_label(name):<28}{left[name]:>12,.2f}{right[name]:>12,.2f}{shown:>9}  {better}".rstrip())
    if notes := remarks(first, second):
        lines += ["", *(f"  note: {note}" for note in notes)]
    return "\n".join(lines)


def _flat(summary: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {name: summary[name] for name in THROUGHPUTS}
    if summary["goodput"]:
        flat["goodput"] = summary["goodput"]["requests_per_second"]
    for name in LATENCIES:
        flat |= {f"{name}.{statistic}": summary[name][statistic] for statistic in SHOWN if summary[name]["count"]}
    return flat


def _verdict(name: str, ratio: float | None) -> str:
    if ratio is None or ratio == 1:
        return ""
    more_is_better = name in THROUGHPUTS or name == "goodput"
    return "better" if (ratio > 1) is more_is_better else "worse"


def _label(name: str) -> str:
    latency, _, statistic = name.partition(".")
    return f"{LABELS[latency]} {statistic}, ms" if statistic else name.replace("_per_second", "/s").replace("_", " ")


def _at(run: dict[str, Any], place: tuple[str, ...]) -> Any:
    value: Any = run
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    return value
