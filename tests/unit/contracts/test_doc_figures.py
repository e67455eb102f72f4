"""The figures that the pages give for speed are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import quantization_tables
from benchmarks.servers import tables

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks/results"
CASES = ("batch-1", "equal", "mixed")


def cases_of(result: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8"))["cases"]
    return cases


def test_the_readme_gives_the_ratios_to_transformers() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    cases = cases_of("runtime_vs_transformers")
    assert re.findall(r"\*\*([\d.]+) ×\*\*", text) == [f"{cases[name]['ratio_of_medians']:.1f}" for name in CASES]


def test_the_readme_gives_the_slowest_takeover_of_a_leader_that_is_lost() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "tests/soak/results/leaders.json").read_text(encoding="utf-8"))["result"]
    assert re.findall(r"reliability\.md#found\): ([\d.]+) s", text) == [f"{found['slowest_takeover_seconds']:.1f}"]


def test_the_benchmark_page_gives_the_ratios_to_the_peers() -> None:
    text = (ROOT / "docs/benchmarking.md").read_text(encoding="utf-8")
    cases = [cases_of(f"vs_peers_{model}")[name] for model in ("demo", "larger") for name in CASES]
    for row, ratio in (("best of transformers", "ratio_to_best_transformers"), ("llama.cpp", "ratio_to_llama_cpp")):
        line = next(
            one for one in text.splitlines() if one.startswith(f"| to {'the ' if 'best' in row else ''}{row} |")
        )
        given = [float(cell) for cell in line.strip("|").split("|")[1:]]
        assert given == [round(case[ratio], 1 if case[ratio] >= 1 else 2) for case in cases]


def test_the_benchmark_page_has_the_tables_of_the_server_results(tmp_path: Path) -> None:
    page = tmp_path / "benchmarking.md"
    committed = (ROOT / "docs/benchmarking.md").read_text(encoding="utf-8")
    page.write_text(committed, encoding="utf-8")
    tables.write(page, RESULTS)
    assert page.read_text(encoding="utf-8") == committed, "run `python -m benchmarks.servers --tables`"


def test_the_quantization_page_gives_what_bounds_8_bit_activations() -> None:
    text = " ".join((ROOT / "docs/quantization.md").read_text(encoding="utf-8").split())
    decodes = json.loads((RESULTS / "quantized_decodes.json").read_text(encoding="utf-8"))["decodes"]
    with_rest, of_products = [], []
    for one in (decode for decode in decodes if decode["requests"] in (1, 16)):
        step_ms, products = one["step_milliseconds"]["16 bit"], one["product_milliseconds"]
        base_ms, w8a8_ms = products["16 bit"], products["INT8 (W8A8)"]
        assert f"{w8a8_ms:.1f} ms" in text
        assert f"{base_ms:.1f} of {step_ms:.1f} ms" in text
        with_rest.append(f"{step_ms / (step_ms - base_ms + w8a8_ms):.2f}")
        of_products.append(f"{base_ms / w8a8_ms:.2f}")
    assert f"{' and '.join(with_rest)} times as fast, and without any rest {' and '.join(of_products)} times" in text


def test_the_quantization_page_has_the_tables_of_its_results() -> None:
    text = (ROOT / "docs/quantization.md").read_text(encoding="utf-8")
    found, kv_cache = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("quantization_quality", "kv_cache_formats")
    )
    assert quantization_tables.methods_table(found, kv_cache) in text
    for table in ("domains_table", "outliers_table"):
        assert getattr(quantization_tables, table)(found) in text


def test_the_engine_page_gives_the_results_on_a_gpu() -> None:
    text = (ROOT / "docs/engine.md").read_text(encoding="utf-8")
    for file in RESULTS.glob("gpu_*.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        for execution, result in found["results"].items():
            assert gpu_row(found["shape"], execution.replace("_", " and "), result) in text


def gpu_row(shape: str, execution: str, result: dict[str, Any]) -> str:
    """The row of one execution mode: `nano` is the case of many requests."""
    cells = []
    for case in ("nano", "alone"):
        share, idle = result[f"{case}_roofline_share"], result[f"{case}_idle_share"]
        speed = f"{result[f'{case}_tokens_per_second']:,.0f}" + (f" ({share:.0%})".replace("%", " %") if share else "")
        cells += [speed, f"{idle * 100:.1f} %"]
    return f"| {shape} | {execution} | {' | '.join(cells)} |"
