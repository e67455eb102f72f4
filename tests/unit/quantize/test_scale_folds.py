"""Which norm or module feeds which modules is found in the model's own code, for every family; folds change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream_runtime.quantize.layers.hidden_states import HiddenStates
from millstream_runtime.quantize.layers.layer_calibration import LayerCalibration
from millstream_runtime.quantize.layers.layer_run import embed
from millstream_runtime.quantize.methods.scale_folds import ScaleFold, find_folds
from millstream_runtime.quantize.source_model import SourceModel
from tests.support.family_cases import CASES
from tests.support.tiny_families import prompts_of, write_family

CPU = torch.device("cpu")
TOKENS = 40
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP, DOWN = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
INPUT, POST = "input_layernorm.weight", "post_attention_layernorm.weight"
LLAMA: dict[tuple[str, float | None], set[tuple[str, ...]]] = {
    (INPUT, 0.0): {QKV},
    (POST, 0.0): {GATE_UP},
    ("mlp.up_proj.weight", None): {DOWN},
}


def experts(block: str, count: int, *names: str) -> set[tuple[str, ...]]:
    return {tuple(f"{block}.experts.{number}.{name}" for name in names) for number in range(count)}


MLA = ("self_attn.q_a_proj",), ("self_attn.kv_a_proj_with_mqa",)
EXPECTED: dict[str, dict[tuple[str, float | None], set[tuple[str, ...]]]] = {
    "llama": LLAMA,
    "llama-biases": LLAMA,
    "llama-as-many-kv-heads": LLAMA | {("self_attn.v_proj.weight", None): {("self_attn.o_proj",)}},
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": LLAMA | {(INPUT, 1.0): {QKV}, ("pre_feedforward_layernorm.weight", 1.0): {GATE_UP}},
    "phi3": {
        (INPUT, 0.0): {("self_attn.qkv_proj",)},
        (POST, 0.0): {("mlp.gate_up_proj",)},
        ("mlp.gate_up_proj.weight", None): {DOWN},
    },
    "mixtral": {(INPUT, 0.0): {QKV}, (POST, 0.0): experts("block_sparse_moe", 5, "w1", "w3")},
    "deepseek-v3": {
        (INPUT, 0.0): set(MLA),
        ("self_attn.q_a_layernorm.weight", 0.0): {("self_attn.q_b_proj",)},
        (POST, 0.0): experts("mlp", 8, "gate_proj", "up_proj")
        | {("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")},
    },
}
for gone in ((INPUT, 0.0), (POST, 0.0)):
    del EXPECTED["gemma2"][gone]


def calibration(folder: Path, work: Path, number: int) -> tuple[SourceModel, LayerCalibration]:
    """Of one layer, whose input is that of the first."""
    source = SourceModel.open(folder)
    (prompt,) = prompts_of([TOKENS])
    shape = HiddenStates(1, TOKENS, source.config.hidden_size)
    config = source.config_for(TOKENS)
    shape.write(work, embed(config, source.tensors["model.embed_tokens.weight"], [prompt]))
    return source, LayerCalibration(config, number, source.outline.layers[number], work, shape, CPU)


def folds_of(folder: Path, work: Path, number: int = 1) -> list[ScaleFold]:
    source, layer = calibration(folder, work, number)
    outline = source.outline.layers[number]
    return find_folds(outline, outline.groups, source.load_layer(outline), layer.sample)


@pytest.mark.parametrize("family", EXPECTED)
def test_the_folds_of_a_family(family: str, tmp_path: Path) -> None:
    config = CASES["llama" if family.endswith("kv-heads") else family].config
    write_family(tmp_path / "m", **(config | {"num_key_value_heads": 4} if family.endswith("kv-heads") else config))
    found = folds_of(tmp_path / "m", tmp_path / "hidden")
    by_producer = {(one.producer, one.offset): set(one.consumers) for one in found}
    expected = EXPECTED[family]
    assert {key: by_producer.get(key) for key in expected} == expected
    more = {group for key, groups in by_producer.items() if key not in expected for group in groups}
    assert all(".experts." in group[0] or "shared_experts" in group[0] for group in more)  # each expert's own rows


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3", "qwen3-moe"])
def test_a_norm_that_feeds_a_router_scales_its_columns_too(family: str, tmp_path: Path) -> None:
    write_family(tmp_path / "m", **CASES[family].config)
    layers = SourceModel.open(tmp_path / "m").outline.layers
    number = next(
        index for index, one in enumerate(layers) if any(name.endswith("gate.weight") for name in one.tensors)
    )
    routers = {one.producer: one.routers for one in folds_of(tmp_path / "m", tmp_path / "hidden", number)}
    assert [name.endswith("gate.weight") for name in routers[POST]] == [True]
    assert routers[INPUT] == ()


def test_scales_of_a_norm_in_16_bits_are_those_that_it_can_hold(tmp_path: Path) -> None:
    write_family(tmp_path / "m", **CASES["llama"].config)
    source, layer = calibration(tmp_path / "m", tmp_path / "hidden", 1)
    outline = source.outline.layers[1]
    tensors = source.load_layer(outline)
    name = f"{outline.prefix}{INPUT}"
    tensors[name] = tensors[name].bfloat16().float()
    base = layer.sample(dict(tensors)).output
    (fold,) = [one for one in find_folds(outline, outline.groups, tensors, layer.sample) if one.producer == INPUT]
    scales = torch.rand(len(tensors[name]), generator=torch.Generator().manual_seed(1)) * 3 + 0.3
    fold.apply(outline, tensors, scales, torch.bfloat16)
    assert torch.equal(tensors[name], tensors[name].bfloat16().float())
    assert torch.allclose(layer.sample(tensors).output, base, rtol=1e-4, atol=1e-4)
