"""What is saved, printed, drawn and compared."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from millstream.bench import compare, plot, report
from millstream.bench.measure import Objective, RequestRecord, measure
from millstream.bench.workload import Range, WorkloadSpec, plan
from millstream.cli import main
from millstream.saved_files import write_saved_file
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure


def run_document(slowness: float = 1.0, error: str | None = None, **spec: Any) -> dict[str, Any]:
    """Ten requests a second apart: first text after 0.1 s × slowness, four more pieces every 0.02 s × slowness."""
    load = WorkloadSpec(**{"request_rate": 1.0, "num_requests": 10, "input_tokens": Range(7, 7), **spec})
    records = [
        RequestRecord(i, i, i, [i + slowness * (0.1 + 0.02 * piece) for piece in range(5)], i + 0.2 * slowness, 7, 5)
        for i in range(10)
    ]
    records[9].error = error
    objective = Objective.parse("ttft_ms:150")
    return report.document(
        mode="serve",
        target={"model": "<tiny>", "at": "at http://127.0.0.1:1", "asked": {"temperature": 0.0}},
        spec=load,
        requests=plan(load),
        records=records,
        measured=measure(records, objective),
        objective=objective,
        environment={"hardware": "a test & nothing else"},
        created="2026-01-01T00:00:00+00:00",
        interrupted=False,
    )


def test_a_document_survives_its_file_and_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_saved_file(path, report.to_json(run_document()))
    run = compare.read(path)
    assert run == run_document()
    assert run["summary"]["ttft_ms"]["p99"] == pytest.approx(100)
    assert run["summary"]["tpot_ms"]["mean"] == pytest.approx(20)
    assert run["summary"]["completion_tokens"] == 50
    assert run["summary"]["goodput"]["share"] == 1.0
    assert len(run["requests"]) == 10
    rate = run["output_tokens_per_second_over_time"]
    assert sum(rate["values"]) * rate["bin_seconds"] == pytest.approx(50, rel=1e-3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_the_table_has_every_metric_and_says_what_failed() -> None:
    text = report.table(run_document(error="The endpoint answered 429: the queue is full."))
    for label in ("TTFT", "ITL", "TPOT", "E2E", "p50", "p99", "goodput", "9 completed   1 failed"):
        assert label in text
    assert "1 × The endpoint answered 429: the queue is full." in text
    assert "0.90" not in text.split("errors")[1]


def test_a_plot_is_an_svg_with_a_curve_in_each_panel_and_the_limit() -> None:
    root = ET.fromstring(plot.svg(run_document()))  # noqa: S314 - our own text
    space = "{http://www.w3.org/2000/svg}"
    curves = list(root.iter(f"{space}polyline"))
    assert len(curves) == 4
    for curve in curves:
        for point in curve.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= plot.WIDTH
            assert 0 <= y <= plot.HEIGHT
    texts = [element.text or "" for element in root.iter(f"{space}text")]
    assert any(text.startswith("<tiny>:") for text in texts)
    assert "≤ 150" in texts
    assert "a test & nothing else" in texts


def test_a_plot_without_samples_says_so() -> None:
    run = run_document()
    run["requests"], run["output_tokens_per_second_over_time"] = [], {"bin_seconds": 0.0, "values": []}
    assert plot.svg(run).count("no samples") == 4


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1, 10, [1, 2, 5, 10]), (3, 40, [2, 5, 10, 20, 50]), (7, 7, [5, 10]), (0.01, 0.01, [0.01, 0.02])],
)
def test_ticks_enclose_what_they_show(low: float, high: float, ticks: list[float]) -> None:
    assert plot.decades(low, high) == pytest.approx(ticks)


def test_a_wide_axis_is_labelled_at_the_powers_of_ten() -> None:
    assert plot.labelled(plot.decades(0.02, 4000)) == pytest.approx([0.1, 1, 10, 100, 1000])


def test_ratios_are_b_over_a_and_say_which_way_is_better() -> None:
    first, second = run_document(), run_document(slowness=2.0)
    ratios = compare.ratios(first, second)
    assert ratios["ttft_ms.p99"] == pytest.approx(2.0)
    assert ratios["tpot_ms.mean"] == pytest.approx(2.0)
    assert ratios["goodput"] == 0.0
    lines = {line.split("  ")[1]: line for line in compare.table(first, second).splitlines() if line.startswith("  ")}
    assert lines["TTFT p99, ms"].endswith("2.000  worse")
    assert lines["goodput"].endswith("worse")
    assert compare.ratios(second, first)["goodput"] is None  # nothing to divide by
    assert "better" not in compare.table(first, first)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"request_rate": 2.0}, "request_rate 1.0 against 2.0"),
        ({"seed": 4}, "seed 0 against 4"),
        ({"output_tokens": Range(5, 6)}, "output_tokens 128 against 5:6"),
        ({"request_rate": None, "concurrency": 4}, "concurrency None against 4"),
    ],
)
def test_different_workloads_are_not_compared(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        compare.table(run_document(), run_document(**spec))
    assert said in caught.value.message


def test_equal_flags_over_another_trace_are_not_compared_either() -> None:
    other = copy.deepcopy(run_document())
    other["workload"]["fingerprint"] = "0" * 16
    with pytest.raises(RuntimeFailure, match="the requests themselves differ"):
        compare.table(run_document(), other)


def test_other_hardware_and_failures_are_noted_not_refused() -> None:
    other = run_document(error="cut")
    other["environment"]["hardware"] = "another test"
    text = compare.table(run_document(), other)
    assert "note: hardware: a test & nothing else against another test" in text
    assert "note: B has 1 failed requests" in text


@pytest.mark.parametrize("content", [None, "", "{}", '{"schema": "other"}', "[1]", '{"schema": "millstream-bench/1"}'])
def test_only_a_saved_run_can_be_compared(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "b.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidConfigError, match=r"b\.json"):
        compare.read(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("interrupted",), None),
        (("workload", "description"), None),
        (("workload", "fingerprint"), None),
        (("summary", "requests_per_second"), "fast"),
        (("summary", "ttft_ms"), 5),
        (("summary", "ttft_ms", "p99"), None),
        (("summary", "itl_ms", "mean"), float("nan")),
        (("summary", "goodput"), 5),
        (("summary", "failed"), None),
    ],
)
def test_a_run_that_somebody_edited_is_refused(tmp_path: Path, place: tuple[str, ...], value: Any) -> None:
    run = run_document()
    parent = run
    for name in place[:-1]:
        parent = parent[name]
    if value is None:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    path = tmp_path / "b.json"
    path.write_text(json.dumps(run))
    with pytest.raises(InvalidConfigError, match=r"b\.json is incomplete"):
        compare.read(path)


def test_nested_lists_are_no_saved_run(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("[" * 100_000)
    with pytest.raises(InvalidConfigError, match=r"b\.json is not a result"):
        compare.read(tmp_path / "b.json")


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(run_document()))
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "TTFT p99, ms" in capsys.readouterr().out
