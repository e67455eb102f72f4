"""Every metric that the code exports is in the docs, and the docs name no metric that does not exist."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from millstream_operator.metrics import OperatorMetrics, StateCollector
from millstream_runtime.server.operations.metrics import COUNTERS, COUNTERS_BY_SOURCE, HISTOGRAMS

ROOT = Path(__file__).resolve().parents[3]
OPERATIONS = ROOT / "runtime/millstream_runtime/server/operations"
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
SUFFIXES = ("_total", "_bucket", "_count", "_sum", "_created", "_info")
MODULES = {"millstream_operator", "millstream_runtime", "millstream_kernels", "millstream_gateway"}
NOT_OURS = {"millstream_dev_deployment"}  # a label of Prometheus


def operator_metrics() -> set[str]:
    """Names without the suffix that the kind of metric adds."""
    metrics = OperatorMetrics()
    metrics.registry.register(
        StateCollector(
            queue_depth=dict,
            queue_age_seconds=float,
            watch_age_seconds=dict,
            leading=lambda: True,
            llmdeployments=list,
        )
    )
    return {family.name for family in metrics.registry.collect() if family.name.startswith("millstream_")}


def runtime_metrics() -> set[str]:
    """From the source: what is exported depends on flags and on the number of ranks."""
    found = {f"vllm:{name}" for name in (*HISTOGRAMS, *COUNTERS, *COUNTERS_BY_SOURCE)}
    for path in OPERATIONS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and re.fullmatch(r"(vllm:|millstream_)[a-z0-9_]+", str(node.value)):
                found.add(str(node.value))
    return found - MODULES


def documented() -> set[str]:
    """`vllm:{a,b}_total` is two names; braces that follow a whole name hold labels."""
    found = set[str]()
    for name in re.findall(r"(?:vllm:|millstream_)(?:(?<=[_:])\{[a-z0-9_,]+\}|[a-z0-9_])+", TEXT):
        found |= set(_expanded(name))
    return found


def _expanded(name: str) -> Iterator[str]:
    parts = [part[1:-1].split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", name)]
    return ("".join(chosen) for chosen in itertools.product(*parts))


def _stem(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def test_every_metric_is_in_the_docs() -> None:
    described = {_stem(name) for name in documented()}
    missing = {name for name in operator_metrics() | runtime_metrics() if _stem(name) not in described}
    assert not missing, "describe them in docs/serving.md (runtime) or docs/high-availability.md (operator)"


def test_the_docs_name_no_metric_that_does_not_exist() -> None:
    ours = {name for name in documented() if name.startswith("millstream_")} - NOT_OURS
    known = {_stem(name) for name in operator_metrics() | runtime_metrics()}
    assert {name for name in ours - MODULES if _stem(name) not in known} == set()
