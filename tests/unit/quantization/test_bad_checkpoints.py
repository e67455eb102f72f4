"""Tensors that contradict quantization_config, or one another, are refused by name before memory is filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.config import RuntimeConfig, WeightFormat
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.family_cases import dense
from tests.support.quantized_checkpoints import gptq, quantized
from tests.support.scaled_checkpoints import fp8
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_families import model_logits, write_family

SETTINGS: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_family(tmp_path / "plain", **dense("llama", hidden_size=64, intermediate_size=96, head_dim=16))
    quantized(tmp_path / "plain", tmp_path / "packed", SETTINGS, gptq(4, 32, act_order=True))
    return tmp_path / "packed"


def load(folder: Path) -> None:
    load_model(load_model_config(folder), folder, torch.float32, torch.device("cpu"))


def change(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {f"{DOWN}.{name}": one for name, one in tensors.items()}, path)


def with_settings(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": SETTINGS | settings}))


def refusal(folder: Path, reason: FailureReason = FailureReason.CHECKPOINT_INVALID) -> str:
    with pytest.raises(RuntimeFailure) as refused:
        load(folder)
    assert refused.value.reason is reason
    return refused.value.message


@pytest.mark.parametrize(
    ("name", "asked", "holds"),
    [
        ("plain", WeightFormat.AWQ, "weights of 16 or 32 bits"),
        ("packed", WeightFormat.AWQ, "GPTQ weights"),
        ("packed", WeightFormat.NONE, "GPTQ weights"),
    ],
)
def test_a_checkpoint_of_another_format_than_was_asked_for(
    name: str, asked: WeightFormat, holds: str, folder: Path
) -> None:
    """It would be served, and everything that reads the spec would take it for what it is not."""
    model = str(folder.parent / name)
    with pytest.raises(InvalidConfigError) as refused:
        resolve_shard_config(RuntimeConfig(model=model, served_model_name="m", quantization=asked))
    assert f"--quantization is {asked.value} (spec.quantization.method), but {model} holds {holds}" in str(
        refused.value
    )


@pytest.mark.parametrize(("name", "asked"), [("plain", "None"), ("packed", "GPTQ"), ("packed", None), ("plain", None)])
def test_a_checkpoint_of_the_format_that_was_asked_for(name: str, asked: str | None, folder: Path) -> None:
    wanted = WeightFormat(asked) if asked is not None else None
    model = str(folder.parent / name)
    resolve_shard_config(RuntimeConfig(model=model, served_model_name="m", quantization=wanted))


PACKED = Path(__file__).resolve().parents[2] / "data" / "packed_checkpoints" / "llm-compressor"
FOUR, EIGHT = (f"{bits}-bit integers of compressed-tensors" for bits in (4, 8))


@pytest.mark.parametrize(
    ("name", "accepted", "words"),
    [
        ("w4a16-awq-zero-points", ("AWQ", "GPTQ"), f"{FOUR} (AWQ, GPTQ or RTN)"),
        ("w4a16-gptq", ("AWQ", "GPTQ"), f"{FOUR} (AWQ, GPTQ or RTN)"),
        ("w8a8-smoothquant", ("INT8", "AWQ", "GPTQ"), f"{EIGHT} (INT8, AWQ, GPTQ or RTN)"),
        ("fp8-static", ("FP8",), "FP8 weights"),
    ],
)
def test_integers_that_do_not_say_who_made_them_are_accepted_under_each_name(
    name: str, accepted: tuple[str, ...], words: str
) -> None:
    """llm-compressor stores AWQ and GPTQ alike: `--quantization AWQ` was refused as GPTQ weights."""
    for asked in WeightFormat:
        config = RuntimeConfig(model=str(PACKED / name), served_model_name="m", quantization=asked)
        if asked.value in accepted:
            resolve_shard_config(config)
            continue
        with pytest.raises(InvalidConfigError) as refused:
            resolve_shard_config(config)
        assert f"holds {words}: leave it out to serve them" in str(refused.value)


@pytest.mark.parametrize("named", [None, {}, SETTINGS | {"modules_to_not_convert": ["layers"]}])
def test_packed_weights_of_which_config_json_says_nothing(named: dict[str, Any] | None, folder: Path) -> None:
    """As older tools left them, which wrote quantize_config.json alone."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": named}))
    name = "model.layers.0.self_attn.q_proj"
    assert f"tensor {name}.weight [64, 64] is missing from the checkpoint; it has {name}.qweight, but " in (
        message := refusal(folder)
    )
    assert "quantization_config of config.json does not say how that is packed" in message
    assert "quantize_config.json" in message


@pytest.mark.parametrize(("group", "named"), [(3, "group 3"), (-1, "group -1")])
def test_an_index_of_a_group_without_scales(group: int, named: str, folder: Path) -> None:
    index = torch.arange(96, dtype=torch.int32) // 32
    index[5] = group
    change(folder, g_idx=index)
    message = refusal(folder)
    assert f"{DOWN}.g_idx" in message
    assert named in message


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("qweight", torch.zeros(12, 64), "is F32; it must be one of I32"),
        ("qweight", torch.zeros(11, 64, dtype=torch.int32), "has shape [11, 64]; config.json asks for [12, 64]"),
        ("scales", torch.zeros(4, 64).half(), "has shape [4, 64]; config.json asks for [3, 64]"),
        ("scales", torch.full((3, 64), float("nan")).half(), "NaN"),
        ("g_idx", torch.zeros(96), "is F32; it must be one of I32, I64"),
    ],
)
def test_a_tensor_of_another_shape_or_type(name: str, tensor: torch.Tensor, words: str, folder: Path) -> None:
    change(folder, **{name: tensor})
    message = refusal(folder)
    assert f"{DOWN}.{name}" in message
    assert words in message


@pytest.mark.parametrize("scale", [3e38, -3e37])
def test_a_scale_that_makes_infinite_weights(scale: float, folder: Path) -> None:
    """Each number is finite, their products are not."""
    scales = torch.full((3, 64), 1e-3)
    scales[1, 7] = scale
    change(folder, scales=scales)
    message = refusal(folder)
    assert f"{DOWN}.scales holds a scale of" in message
    assert "codes up to 15" in message


def test_a_scale_of_fp8_that_makes_infinite_weights(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", **dense("llama", hidden_size=64, intermediate_size=96, head_dim=16))
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    quantized(tmp_path / "plain", tmp_path / "packed", settings, fp8("weight_scale", None, shape=()))
    change(tmp_path / "packed", weight_scale=torch.tensor(1e37))
    assert f"{DOWN}.weight_scale holds a scale of 1e+37" in refusal(tmp_path / "packed")


@pytest.mark.parametrize("settings", [{"bits": 8}, {"group_size": 64}, {"group_size": -1}])
def test_settings_that_the_tensors_contradict(settings: dict[str, int], folder: Path) -> None:
    with_settings(folder, **settings)
    assert "quantization_config" in refusal(folder)


def test_a_missing_order_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if not name.endswith("g_idx")}, path)
    assert "g_idx [64] is missing" in refusal(folder)


def test_a_share_that_ends_within_a_packed_word_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path / "plain", **dense("llama", hidden_size=64, intermediate_size=72, head_dim=16))
    quantized(tmp_path / "plain", tmp_path / "packed", SETTINGS, gptq(4, 24, act_order=True))
    with_settings(tmp_path / "packed", group_size=24)
    with pytest.raises(InvalidConfigError, match=r"--tensor-parallel-size cuts .*gate_proj at .*packed word of 8"):
        on_ranks(2, lambda ranks: model_logits(tmp_path / "packed", [1, 2, 3], 8, ranks=ranks))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported by this runtime; supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head True"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}}, "dynamic"),
        (
            {"quant_method": "awq", "version": "gemv"},
            "version 'gemv' is not supported by this runtime; supported: gemm",
        ),
        ({"quant_method": "awq", "bits": 8}, "bits 8"),
        ({"quant_method": "quip"}, "quant_method 'quip'"),
        ({}, ""),
    ],
)
def test_a_format_that_is_not_read_is_refused_by_its_field(settings: dict[str, Any], words: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    if not settings:
        assert load_model_config(folder).quantization is None
        return
    assert words in refusal(folder, FailureReason.UNSUPPORTED_BY_RUNTIME)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"quant_method": 4}, "quant_method"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1 << 40}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": "yes"}, "desc_act"),
        ({"quant_method": "awq", "modules_to_not_convert": [7]}, "modules_to_not_convert"),
        ({"quant_method": "awq", "ignore": ["a"] * 5000}, "ignore"),
    ],
)
def test_an_impossible_value_is_named(settings: dict[str, Any], field: str, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    assert f"quantization_config.{field} is " in refusal(folder)
