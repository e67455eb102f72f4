"""The results as the tables of docs/benchmarking.md. `python -m benchmarks.servers --tables` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.servers.goals import LATENCIES
from benchmarks.servers.models import AUTO, FLOAT32, MODELS
from benchmarks.servers.peers import OURS, SERVERS, VLLM

BEGIN, END = "<!-- benchmarks.servers: begin -->", "<!-- benchmarks.servers: end -->"
NOTHING = "No results are committed yet."


def write(page: Path, results: Path) -> None:
    """Replace what stands between the marks of `page`.

    Raises:
        ValueError: the page has no marks.
    """
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n\n{render(results)}\n\n{END}{tail}", encoding="utf-8")


def render(results: Path) -> str:
    """All committed results as Markdown."""
    files = [results / f"servers_{model}_{dtype}.json" for dtype in (AUTO, FLOAT32) for model in MODELS]
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return "\n\n".join(map(one_model, reports)) if reports else NOTHING


def one_model(report: dict[str, Any]) -> str:
    """Throughput, latencies beside vLLM, and the goals that were missed."""
    dtype = "each server's own dtype" if report["dtype"] == AUTO else "float32"
    cores, rounds = report["machine"]["cores"], report["rounds"]
    parts = [f"**{report['description']}, {dtype}**, {cores} cores, medians of {rounds} rounds.{_memory(report)}"]
    parts.append(_throughput(report))
    if any(VLLM in case["medians"] for case in report["cases"].values()):
        parts.append(_latencies(report))
    parts.append(_goals(report))
    parts += [f"{SERVER_TITLES.get(name, name)}: {why}." for name, why in _remarks(report).items()]
    return "\n\n".join(parts)


def _memory(report: dict[str, Any]) -> str:
    """What each server holds behind the last case; nothing in results from before that was measured."""
    sizes = {_titled(report, name): about.get("memory_bytes") for name, about in report["servers"].items()}
    listed = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items() if size)
    return f" Memory: {listed}." if listed else ""


def _throughput(report: dict[str, Any]) -> str:
    measured = {name for case in report["cases"].values() for name in case["medians"]}
    peers = [name for name in SERVERS if name in measured and name != OURS]
    rows = [["clients", "Millstream, tokens/s", *(f"ratio to {_titled(report, name)}" for name in peers)]]
    for name, case in report["cases"].items():
        ours = case["medians"].get(OURS, {}).get("tokens_per_second")
        ratios = [case["ratios"].get(peer, {}).get("tokens_per_second") for peer in peers]
        rows.append([name.replace("-", " "), _number(ours, 0), *(_number(ratio, 2) for ratio in ratios)])
    return _markdown(rows)


def _latencies(report: dict[str, Any]) -> str:
    rows = [["Millstream : vLLM, ms", *LATENCIES.values()]]
    for name, case in report["cases"].items():
        if OURS in case["medians"] and VLLM in case["medians"]:
            ours, theirs = case["medians"][OURS], case["medians"][VLLM]
            rows.append([name.replace("-", " "), *(f"{_ms(ours[key])} : {_ms(theirs[key])}" for key in LATENCIES)])
    return _markdown(rows)


def _goals(report: dict[str, Any]) -> str:
    missed = [goal for goal in report["goals"] if not goal["reached"]]
    reached = f"{len(report['goals']) - len(missed)} of {len(report['goals'])} goals reached"
    if not missed:
        return f"{reached}."
    rows = [["missed goal", "clients", "found", "goal"]]
    rows += [[one["what"], one["case"].replace("-", " "), _number(one["value"], 2), one["goal"]] for one in missed]
    return f"{reached}.\n\n{_markdown(rows)}"


def _remarks(report: dict[str, Any]) -> dict[str, str]:
    """Why a server is absent, and who answers otherwise than ours."""
    remarks = {name: f"not measured, {why.rstrip('.')}" for name, why in report["absent"].items()}
    for name, about in report["servers"].items():
        if name != OURS and not all(about["same_greedy_answers"]):
            same = about["same_greedy_answers"]
            remarks[name] = f"{sum(same)} of {len(same)} greedy answers equal to ours"
    return remarks


SERVER_TITLES = {VLLM: "vLLM", "openvino": "OpenVINO GenAI"}


def _titled(report: dict[str, Any], name: str) -> str:
    version = report["servers"].get(name, {}).get("version") or ""
    return f"{SERVER_TITLES.get(name, name)} {version}".strip()


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
