"""Our INT8 and FP8 folders as compressed-tensors reads them, and what it writes as we read it: bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from millstream_runtime.models.loading.checkpoint import Checkpoint
from millstream_runtime.models.loading.weights import LoadedWeights
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.quantization.layouts import layout_for
from tests.unit.quantize.conftest import quantize

pytestmark = pytest.mark.deep

CPU = torch.device("cpu")
METHODS = {
    "int8": ["--method=int8"],
    "fp8-dynamic": ["--method=fp8"],
    "fp8-static": ["--method=fp8", "--activation-scheme=static"],
}
FEW = ("--max-sequences=32", "--sequence-tokens=128", "--no-quality")


@pytest.fixture(scope="module", params=METHODS)
def made(request: pytest.FixtureRequest, tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("made") / request.param
    assert quantize(tiny, out, *METHODS[request.param], f"--calibration={data}", *FEW) == 0
    return out


def theirs(folder: Path) -> tuple[Any, QuantizationScheme, list[str]]:
    """The compressor of the folder's format, its scheme, and the names of modules that it leaves alone."""
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(described)
    (scheme,) = config.config_groups.values()
    return BaseCompressor.get_value_from_registry(config.format), scheme, config.ignore


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def ours(folder: Path, module: str, weight: Tensor) -> Tensor:
    """The weight `[out, in]` that this runtime computes with, in float32."""
    config = load_model_config(folder)
    assert config.quantization is not None
    with Checkpoint(folder) as checkpoint:
        weights = LoadedWeights(checkpoint, torch.float32, CPU)
        return layout_for(config.quantization.format).dense_weight(weights, module, *weight.shape)


def local(tensors: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    """The tensors of a module by their names in it."""
    return {name.rpartition(".")[2]: one for name, one in tensors.items() if name.rpartition(".")[0] == module}


def test_it_decompresses_what_we_compute_with(made: Path) -> None:
    compressor, scheme, ignored = theirs(made)
    tensors = tensors_of(made)
    modules = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
    assert len(modules) == 4 * 7
    assert "lm_head" in ignored
    for module in modules:
        weight = compressor.decompress(local(tensors, module), scheme)["weight"]
        assert torch.equal(weight.float(), ours(made, module, weight)), module


def test_we_compute_with_what_it_compresses(made: Path, tiny: Path, tmp_path: Path) -> None:
    """Its own codes, of the model's own weights, by the scales of our folder."""
    compressor, scheme, _ = theirs(made)
    module = "model.layers.1.mlp.up_proj"
    plain = load_file(tiny / "model.safetensors")[f"{module}.weight"]
    scale = local(tensors_of(made), module)["weight_scale"]
    packed = compressor.compress({"weight": plain, "weight_scale": scale}, scheme)
    save_file({f"{module}.{name}": one.contiguous() for name, one in packed.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made / "config.json").read_text())
    expected = compressor.decompress(packed, scheme)["weight"].float()
    assert torch.equal(ours(tmp_path, module, plain), expected)
    assert 0 < float((expected - plain).abs().max()) < float(plain.abs().max())
