"""Which shares of its data sheet's peaks a GPU reached, fitted to the steps that engines timed on it. Imports no torch.

    one request decodes   seconds = bytes / (bandwidth * share) + overhead          a line through several models
    a prompt              seconds = FLOPs / (arithmetic * share) + overhead         one share for all

Bytes and FLOPs are those of `millstream_runtime.roofline`, from which the planner predicts with the same shares. They
become the GPU's entry in `operator/millstream_operator/catalog/efficiencies.yaml`. One GPU has no links to measure:
their share stays the assumed one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.roofline import sizes_of
from benchmarks.gpu.shapes import SHAPES
from millstream_operator.catalog import efficiencies as catalog
from millstream_operator.catalog.efficiencies import Efficiency, parse_efficiencies
from millstream_operator.catalog.gpu import CatalogError, GpuPart, load_catalog
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part
from millstream_runtime.roofline import Work, attention_flops, step_work

FILE = Path(catalog.__file__).with_name("efficiencies.yaml")
EXECUTION = "graphs_overlapped"  # as an engine serves
LEAST_RATIO = 2.0  # between the largest and the smallest of the models' bytes: a line needs two places


class NotMeasuredError(ValueError):
    """Shares that do not follow from what was timed. `str()` is one sentence."""


@dataclass(frozen=True, slots=True)
class TimedWork:
    """A step, and how long it took."""

    work: Work
    seconds: float
    is_decode: bool


def timed_works(config: Mapping[str, Any], steps: Iterable[Mapping[str, int]]) -> list[TimedWork]:
    """The steps of a report by which shares are fitted: decodes of one request, and prompts.

    Args:
        config: of the model, as its config.json.
        steps: as `TimedStep.measured` says them.
    """
    sizes, found = sizes_of(dict(config)), []
    for step in steps:
        tokens, context = step["new_tokens"], step["context_tokens"]
        if step["sequences"] != 1:
            continue
        work = step_work(sizes, tokens, context)
        if tokens > 1:  # a query of a prompt sees on average half of it
            work += Work(flops=attention_flops(sizes, tokens * (context + tokens // 2)))
        found.append(TimedWork(work, step["step_microseconds"] / 1e6, tokens == 1))
    return found


def fit(part: GpuPart, steps: Sequence[TimedWork], source: str, link_percent: float) -> Efficiency:
    """Return the shares by which the planner predicts the times of `steps` best.

    Raises:
        NotMeasuredError: too few models, or times that no share between 0 and 100 % explains.
    """
    bandwidth, flops = part.memory_bandwidth_bytes_per_second, part.dtype_flops("bf16")
    decodes = [(one.work.num_bytes / bandwidth, one.seconds) for one in steps if one.is_decode]
    prompts = [
        (one.work.flops / flops, one.seconds)
        for one in steps
        if not one.is_decode and one.work.flops / flops > one.work.num_bytes / bandwidth
    ]
    if len(decodes) < 2 or max(decodes)[0] < LEAST_RATIO * min(decodes)[0]:
        raise NotMeasuredError("decodes of two models, one twice as large as the other, are needed")
    if not prompts:
        raise NotMeasuredError("no prompt was timed that arithmetic bounds")
    slope, overhead_seconds = _line(decodes)
    busy = sum(seconds - overhead_seconds for _, seconds in prompts)
    share_of_flops = sum(least for least, _ in prompts) / busy if busy > 0 else float("inf")
    share_of_bandwidth = 1 / slope if slope > 0 else float("inf")
    for share, what in ((share_of_bandwidth, "bandwidth"), (share_of_flops, "arithmetic")):
        if share > 1:
            raise NotMeasuredError(f"the steps were quicker than the data sheet's {what} of the {part.name} allows")
    return Efficiency(
        basis="measured",
        source=source,
        compute_percent=round(100 * share_of_flops, 1),
        bandwidth_percent=round(100 * share_of_bandwidth, 1),
        link_percent=link_percent,
        step_overhead_microseconds=round(1e6 * overhead_seconds, 1),
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and height at zero of the line by least squares; through zero where the height would be negative."""
    count = len(points)
    mean_x, mean_y = (sum(values) / count for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    if (height := mean_y - slope * mean_x) >= 0:
        return slope, height
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points), 0.0


def record(results: Path, cuda_device: str, file: Path = FILE) -> str:
    """Fit the reports of one kind of GPU in `results`, and write its entry into `file`. Returns a line for people.

    Raises:
        NotMeasuredError: the catalogue does not know the GPU, or its reports are not enough.
    """
    try:
        part = find_part(load_catalog(), cuda_device)
    except UnknownGPUError as error:
        raise NotMeasuredError(str(error).removesuffix(".")) from None
    steps: list[TimedWork] = []
    versions = set()
    for name, shape in SHAPES.items():
        report = _read(results / f"gpu_{name.lower()}.json")
        measured = report.get("results", {}).get(EXECUTION, {}).get("steps")
        if measured and report["machine"].get("cuda_device") == cuda_device:
            steps += timed_works(shape.config, measured)
            versions.add(report["machine"].get("torch", "?"))
    before = yaml.safe_load(file.read_text(encoding="utf-8"))
    source = (
        f"python -m benchmarks.gpu on one {cuda_device} with torch {', '.join(sorted(versions))}: timed steps of "
        "published shapes; the links' share is assumed"
    )
    found = fit(part, steps, source, before["default"]["linkPercent"])
    write_entry(file, part.name, found)
    return (
        f"{part.name}: {found.compute_percent} % of arithmetic, {found.bandwidth_percent} % of bandwidth, "
        f"{found.step_overhead_microseconds} µs per step; written to {file.name}"
    )


def write_entry(file: Path, part: str, efficiency: Efficiency) -> None:
    """Put one part's entry into the file, whose other lines and comments stay.

    Raises:
        CatalogError: the file, or what it would become, is not valid; then it stays as it is.
    """
    text = file.read_text(encoding="utf-8")
    head, found, _ = text.partition("\nparts:")
    if not found:
        raise CatalogError(f"GPU efficiencies: {file.name} has no line that begins with parts:.")
    content = yaml.safe_load(text)
    parts = dict(content["parts"]) | {part: efficiency.model_dump(by_alias=True)}
    parse_efficiencies(content | {"parts": parts})
    dumped = yaml.safe_dump({"parts": dict(sorted(parts.items()))}, sort_keys=False, width=1000, allow_unicode=True)
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text(f"{head}\n{dumped}", encoding="utf-8")
    temporary.replace(file)


def _read(path: Path) -> dict[str, Any]:
    """A report; {} where there is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}
