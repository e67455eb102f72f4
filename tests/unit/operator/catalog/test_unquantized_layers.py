"""What a quantised checkpoint keeps in 16 bit is counted in 16 bit: `ignore`, `modules_to_not_convert`, `targets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import UnsupportedModelError
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.sizing.weights import rank_weights, weight_format

CONFIGS = Path(__file__).resolve().parents[3] / "data" / "model_configs"


def shape(name: str = "llama-3-70b", targets: list[str] | None = None, **quantization: Any) -> ModelShape:
    values: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    group = {"weights": {"num_bits": 8, "type": "float"}, "targets": targets or ["Linear"]}
    found = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | quantization
    return read_shape(values | {"quantization_config": found})


@pytest.mark.parametrize(
    "kept",
    [
        ["lm_head"],
        ["re:.*lm_head"],
        ["lm_head", "re:visual.*", "re:vision_tower.*", "multi_modal_projector"],
        ["vision_tower.encoder.layers.0.self_attn.q_proj", "model.visual.blocks.3.mlp.down_proj"],
        ["model.layers.0.input_layernorm", "re:.*mlp.gate$", "model.layers.3.mlp.gate"],
    ],
)
def test_what_is_never_quantised_changes_nothing(kept: list[str]) -> None:
    assert shape("qwen3-30b-a3b", ignore=kept).unquantized_parameters == 0


@pytest.mark.parametrize(
    ("kept", "share_of"),
    [
        (["self_attn"], lambda p: p.attention),
        (["re:.*self_attn.*"], lambda p: p.attention),
        (["re:^model\\.layers\\.\\d+\\.self_attn\\.(q|k|v|o)_proj$"], lambda p: p.attention),
        (["re:.*mlp.*", "re:.*down_proj"], lambda p: p.mlp),
        (["model.layers.0"], lambda p: p.linear // 80),
        (["re:model.layers.(3|5).*mlp.*"], lambda p: p.mlp // 80 * 22),
        (["re:.*layers.7.*"], lambda p: p.linear // 80 * 11),
        (["language_model.model.layers.0"], lambda p: p.linear // 80),
        (["model.language_model.layers.0.mlp", "model.language_model.layers.1.mlp"], lambda p: p.mlp // 80 * 2),
        (["re:language_model.*self_attn.*"], lambda p: p.attention),
        (["model.layers.0.mlp.down_proj", "model.layers.79.mlp.down_proj"], lambda p: p.mlp // 3 // 80 * 2),
        ({"model.layers.*.mlp.gate_proj": 40, "lm_head": 1}, lambda p: p.mlp // 3 // 2),
        (["re:.*"], lambda p: p.linear),
    ],
)
def test_kept_modules_are_counted_once(kept: Any, share_of: Any) -> None:
    found = shape(ignore=kept)
    assert found.unquantized_parameters > 0
    assert found.unquantized_parameters == pytest.approx(share_of(found.parameters), rel=0.001)


def test_modules_that_are_no_target_are_in_16_bit() -> None:
    found = shape(targets=["re:.*mlp.*"])
    assert found.unquantized_parameters == pytest.approx(found.parameters.attention, rel=0.001)


def test_experts_may_be_all_that_is_quantised() -> None:
    found = shape("mixtral-8x7b", ignore=["re:.*self_attn.*", "re:.*block_sparse_moe.gate"])
    assert found.unquantized_parameters == pytest.approx(found.parameters.attention, rel=0.001)


def test_the_ledger_counts_them_in_16_bit_on_every_rank() -> None:
    all_fp8, kept = shape(), shape(ignore=["re:.*self_attn.*"])
    for tensor in (1, 8):
        more = (
            rank_weights(kept, weight_format(kept, "FP8"), tensor).linear_bytes
            - rank_weights(all_fp8, weight_format(all_fp8, "FP8"), tensor).linear_bytes
        )
        assert more * tensor == pytest.approx(kept.parameters.attention, rel=0.01)


@pytest.mark.parametrize(
    "pattern",
    ["re:(a+)+$model.layers", "re:.*[qk]_proj", "re:" + "(a|b)" * 20, "model.layers.0.no_such_proj", "x" * 300],
)
def test_a_pattern_that_is_not_understood_is_refused_and_never_run(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match="quantization_config names"):
        shape(ignore=[pattern])
