"""8-bit formats: what is written, and SmoothQuant's scales, which leave the function of a layer as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millstream_runtime.quantization.eight_bit_rounding import round_to_fp8, round_to_int8
from millstream_runtime.quantize.layers.input_statistics import InputStatistics
from millstream_runtime.quantize.methods.awq_search import ScaledModules
from millstream_runtime.quantize.methods.smoothquant import smoothing_scales
from tests.unit.quantize.conftest import quantize


def test_rounding_is_within_half_a_step() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e-3
    weight[4] = 0
    int8 = round_to_int8(weight)
    assert ((int8.dequantized() - weight).abs() <= int8.scales * 0.5001).all()
    fp8 = round_to_fp8(weight, per_tensor=False)  # three bits behind the leading one
    assert torch.allclose(fp8.dequantized(), weight, rtol=1 / 15, atol=1e-6 + float(fp8.scales.max()) * 2**-9)
    whole = round_to_fp8(weight, per_tensor=True)
    assert whole.scales.shape == (1,)
    assert float(whole.dequantized().abs().max()) == pytest.approx(float(weight.abs().max()), rel=1e-6)


def test_smoothing_shares_outliers_between_activations_and_weights() -> None:
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    rows[:, 5] *= 100
    rows[:, 9] = 0
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    statistics = InputStatistics.empty(64, torch.device("cpu"), with_moments=False)
    statistics.add(rows)
    scales = smoothing_scales([ScaledModules(weight, statistics)], False)
    assert scales[9] == 1
    smoothed, scaled = (rows / scales).abs().amax(0), (weight * scales).abs().amax(0)
    seen = torch.arange(64) != 9
    assert torch.allclose(smoothed[seen], scaled[seen], rtol=1e-4)  # exponent 0.5: equally large
    assert smoothed[5] < 0.2 * rows[:, 5].abs().max()


@pytest.mark.deep
def test_static_fp8_has_the_largest_activation_of_each_module(tiny: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--method=fp8", "--activation-scheme=static", f"--calibration={data}", "--no-quality")
    assert quantize(tiny, tmp_path / "out", *flags) == 0
    stored = {name: one for path in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(path).items()}
    scales = {name: float(one) for name, one in stored.items() if name.endswith("input_scale")}
    assert len(scales) == 4 * 7
    assert all(0 < one < 10 for one in scales.values())
    first = "model.layers.0.self_attn"
    assert scales[f"{first}.q_proj.input_scale"] == scales[f"{first}.v_proj.input_scale"]
    (group,) = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["config_groups"].values()
    assert (group["input_activations"]["dynamic"], group["weights"]["strategy"]) == (False, "tensor")


@pytest.mark.deep
def test_int8_moves_scales_into_norms(tiny: Path, data: Path, tmp_path: Path) -> None:
    assert quantize(tiny, tmp_path / "out", "--method=int8", f"--calibration={data}", "--no-quality") == 0
    stored = {name: one for path in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(path).items()}
    base = load_file(tiny / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(stored[norm], base[norm])
    assert torch.equal(stored["model.norm.weight"], base["model.norm.weight"])
    assert stored["model.layers.1.self_attn.q_proj.weight"].dtype == torch.int8
