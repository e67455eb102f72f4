"""`benchmarks.quantization_memory`: what 70B takes follows from the measured times; a run of a tiny shape works."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import quantization_memory
from benchmarks.quantization_memory import (
    METHODS,
    SHAPE_70B,
    USUAL_TOKENS,
    hours_for_70b,
    measure,
    write_data,
    write_model,
)

PARTS = {"statistics": 2.0, "rounding": 3.0, "outputs": 1.0}
HIDDEN, INTERMEDIATE, LAYERS = 256, 512, 1


@pytest.mark.parametrize("method", METHODS)
def test_the_same_shape_and_tokens_take_the_same_time_per_layer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = quantization_memory.SEQUENCES * quantization_memory.SEQUENCE_TOKENS
    monkeypatch.setattr(quantization_memory, "USUAL_TOKENS", tokens)
    hours = hours_for_70b(method, PARTS, SHAPE_70B["hidden"], SHAPE_70B["intermediate"])
    assert hours == pytest.approx(sum(PARTS.values()) * SHAPE_70B["layers"] / 3600)


def test_rounding_by_gptq_grows_with_the_cube_and_passes_with_the_tokens() -> None:
    tokens = quantization_memory.SEQUENCES * quantization_memory.SEQUENCE_TOKENS
    half = SHAPE_70B["hidden"] // 2, SHAPE_70B["intermediate"] // 2
    layers = SHAPE_70B["layers"] / 3600
    rounding = {"statistics": 0.0, "rounding": 1.0, "outputs": 0.0}
    assert hours_for_70b("gptq", rounding, *half) == pytest.approx(8 * layers)
    assert hours_for_70b("awq", rounding, *half) == pytest.approx(4 * layers, rel=0.02)
    outputs = {"statistics": 0.0, "rounding": 0.0, "outputs": 1.0}
    assert hours_for_70b("gptq", outputs, *half) == pytest.approx(4 * layers * USUAL_TOKENS / tokens, rel=0.02)


def test_a_disk_that_is_too_small_ends_it_before_the_model_is_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"GB are needed; set TMPDIR"):
        quantization_memory.require_disk(tmp_path, 1 << 17, 1 << 18, 1000)
    quantization_memory.require_disk(tmp_path, HIDDEN, INTERMEDIATE, LAYERS)


@pytest.mark.deep
def test_a_tiny_shape_is_measured(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    write_model(model, HIDDEN, INTERMEDIATE, LAYERS)
    write_data(data)
    given = argparse.Namespace(hidden=HIDDEN, intermediate=INTERMEDIATE, layers=LAYERS)
    row = measure(model, data, tmp_path / "out", "gptq", given)
    assert row["above_imports_bytes"] > 0
    assert row["layer_and_moments_bytes"] == 4 * (
        2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * INTERMEDIATE + 3 * HIDDEN**2 + INTERMEDIATE**2
    )
    assert set(row["seconds_per_layer"]) == {"statistics", "rounding", "outputs"}
    assert row["hours_for_70b"] > 0
    assert not (tmp_path / "out").exists()
