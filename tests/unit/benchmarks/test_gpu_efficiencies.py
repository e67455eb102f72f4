"""The planner's shares of a GPU's peaks, from steps that were timed on it: what is fitted, written and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu.efficiencies import FILE, NotMeasuredError, TimedWork, fit, record, timed_works, write_entry
from benchmarks.gpu.shapes import SHAPES
from millstream_operator.catalog.efficiencies import Efficiency, efficiencies, parse_efficiencies
from millstream_operator.catalog.gpu import CatalogError, GpuPart, load_catalog
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.sizing import roofline
from millstream_operator.planning.sizing.memory_ledger import kv_bytes_per_token
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from millstream_runtime.roofline import Work

PART, DEVICE = "H200-141GB", "NVIDIA H200"
REACHED = Efficiency(
    basis="measured",
    source="steps of a known speed",
    compute_percent=62.5,
    bandwidth_percent=81.0,
    link_percent=70,
    step_overhead_microseconds=250.0,
)


def part() -> GpuPart:
    found = load_catalog().get(PART)
    assert found is not None
    return found


def seconds_of(one: TimedWork, reached: Efficiency = REACHED) -> float:
    arithmetic = one.work.flops / (part().dtype_flops("bf16") * reached.compute)
    memory = one.work.num_bytes / (part().memory_bandwidth_bytes_per_second * reached.bandwidth)
    return max(arithmetic, memory) + reached.step_overhead_seconds


def steps_of(name: str) -> list[dict[str, int]]:
    """As an engine reports them: decodes of one and of 256 requests, and a prompt."""
    steps = [(1, 1, 4), (256, 256, 1024), (1, 2048, 0)]
    names = ("sequences", "new_tokens", "context_tokens", "step_microseconds")
    reported = [dict(zip(names, (*step, 1), strict=True)) for step in steps]
    timed = iter(timed_works(SHAPES[name].config, reported))
    return [
        one | {"step_microseconds": round(1e6 * seconds_of(next(timed)))} if one["sequences"] == 1 else one
        for one in reported
    ]


def write_reports(folder: Path, names: Iterable[str] = SHAPES, device: str = DEVICE) -> None:
    for name in names:
        results = {"eager": {}, "graphs_overlapped": {"steps": steps_of(name)}}
        report = {"shape": name, "machine": {"cuda_device": device, "torch": "2.11.0"}, "results": results}
        (folder / f"gpu_{name.lower()}.json").write_text(json.dumps(report))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILE, tmp_path / "efficiencies.yaml"))


def test_the_shares_that_made_the_times_are_found(tmp_path: Path, file: Path) -> None:
    write_reports(tmp_path)
    line = record(tmp_path, DEVICE, file)
    found = parse_efficiencies(yaml.safe_load(file.read_text())).of(PART)
    assert found.basis == "measured"
    assert found.compute_percent == pytest.approx(REACHED.compute_percent, rel=0.01)
    assert found.bandwidth_percent == pytest.approx(REACHED.bandwidth_percent, rel=0.01)
    assert found.step_overhead_microseconds == pytest.approx(REACHED.step_overhead_microseconds, rel=0.02)
    assert found.link_percent == efficiencies().default.link_percent
    assert found.source.startswith("python -m benchmarks.gpu on one NVIDIA H200 with torch 2.11.0: ")
    assert line.startswith(f"{PART}: {found.compute_percent} % of arithmetic, ")


def test_the_planner_predicts_the_times_that_were_measured(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reports(tmp_path)
    record(tmp_path, DEVICE, file)
    measured = parse_efficiencies(yaml.safe_load(file.read_text()))
    monkeypatch.setattr(roofline, "efficiencies", lambda: measured)
    for name in ("Qwen3-0.6B", "Llama-3.1-8B"):
        shape = read_shape(SHAPES[name].config | {"torch_dtype": "bfloat16"})
        machine = roofline.Machine(
            part=part(),
            shape=shape,
            weights=rank_weights(shape, weight_format(shape, "None")),
            method="None",
            tensor=1,
            pipeline=1,
            kv_bytes=kv_bytes_per_token(shape, "None", 1),
            over_nvlink=False,
        )
        decode, _, prompt = steps_of(name)
        assert roofline.step_seconds(machine, 1, 4) * 1e6 == pytest.approx(decode["step_microseconds"], rel=0.01)
        seconds = roofline.prefill_seconds(machine, 2048, 2048)
        assert seconds * 1e6 == pytest.approx(prompt["step_microseconds"], rel=0.02)


def test_other_lines_and_entries_of_the_file_stay(tmp_path: Path, file: Path) -> None:
    write_entry(file, "A100-80GB", REACHED)
    write_reports(tmp_path)
    record(tmp_path, DEVICE, file)
    text, before = file.read_text(), FILE.read_text()
    assert text.startswith(before[: before.index("\nparts:")])
    found = parse_efficiencies(yaml.safe_load(text))
    assert [*found.parts] == ["A100-80GB", PART]
    assert found.parts["A100-80GB"] == REACHED
    assert found.default == efficiencies().default
    assert [*tmp_path.glob("*.new")] == []
    again = record(tmp_path, DEVICE, file)
    assert file.read_text() == text, again


@pytest.mark.parametrize(
    ("names", "device", "problem"),
    [
        ([], DEVICE, "decodes of two models, one twice as large as the other, are needed"),
        (["Qwen3-8B", "Llama-3.1-8B"], DEVICE, "decodes of two models, one twice as large"),
        (SHAPES, "NVIDIA A100-SXM4-80GB", "decodes of two models, one twice as large"),
        (SHAPES, "NVIDIA H300", "The GPU 'NVIDIA H300' is not in the catalogue"),
    ],
)
def test_reports_that_are_not_enough_change_nothing(
    names: Iterable[str], device: str, problem: str, tmp_path: Path, file: Path
) -> None:
    write_reports(tmp_path, names)
    (tmp_path / "gpu_damaged.json").write_text("{")
    with pytest.raises(NotMeasuredError) as refused:
        record(tmp_path, device, file)
    assert problem in str(refused.value)
    assert file.read_bytes() == FILE.read_bytes()


def times(decode_share: float, prompt_share: float) -> list[TimedWork]:
    """Two decodes and a prompt, at these shares of the peaks."""
    bandwidth, flops = part().memory_bandwidth_bytes_per_second, part().dtype_flops("bf16")
    decodes = [TimedWork(Work(size, 1.0), size / bandwidth / decode_share, True) for size in (1e9, 16e9)]
    return [*decodes, TimedWork(Work(1e9, 1e14), 1e14 / flops / prompt_share, False)]


def test_times_that_the_data_sheet_excludes_are_refused() -> None:
    found = fit(part(), times(0.9, 0.5), "a test of shares", 70)
    assert (found.bandwidth_percent, found.compute_percent, found.step_overhead_microseconds) == (90.0, 50.0, 0.0)
    with pytest.raises(NotMeasuredError, match="quicker than the data sheet's bandwidth of the H200-141GB"):
        fit(part(), times(1.1, 0.5), "a test of shares", 70)
    with pytest.raises(NotMeasuredError, match="quicker than the data sheet's arithmetic"):
        fit(part(), times(0.9, 1.2), "a test of shares", 70)
    with pytest.raises(NotMeasuredError, match="no prompt was timed that arithmetic bounds"):
        fit(part(), times(0.9, 0.5)[:2], "a test of shares", 70)


def test_overhead_is_never_negative() -> None:
    """A small model that is quicker than a line through both: the line goes through zero."""
    bandwidth = part().memory_bandwidth_bytes_per_second
    small, large = (
        TimedWork(Work(size, 1.0), size / bandwidth * cost, True) for size, cost in ((1e9, 1.0), (16e9, 1.25))
    )
    found = fit(part(), [small, large, *times(0.9, 0.5)[2:]], "a test of shares", 70)
    assert found.step_overhead_microseconds == 0.0
    assert found.bandwidth_percent == pytest.approx(80, rel=0.01)


def test_a_file_without_parts_is_left_alone(tmp_path: Path) -> None:
    damaged: Any = tmp_path / "efficiencies.yaml"
    damaged.write_text("default: {}\n")
    with pytest.raises(CatalogError, match="has no line that begins with parts:"):
        write_entry(damaged, PART, REACHED)
    assert damaged.read_text() == "default: {}\n"
