"""No field of config.json is dropped in silence: it is read, has no effect, or is refused, in the plan and at boot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.inspected_model import read_inspected
from millstream_operator.catalog.read_shape import read_shape_file
from millstream_runtime.config_json_fields import unread_fields
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.model_families import RUNNABLE, WITH_VISION
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.inspection.shape import describe
from millstream_runtime.sources.safetensors_header import WeightsSummary

DATA = Path(__file__).parents[2] / "data"
FAMILY_OF = {
    name: family.model_type for family in RUNNABLE for name in (family.architecture, *family.other_architectures)
} | {name: family.model_type for name, family in WITH_VISION.items()}
# Fields and their values as folders publish them; of nested objects only what decides.
SPELLINGS: dict[str, dict[str, Any]] = json.loads((DATA / "config_fields.json").read_text()) | {
    path.stem: json.loads(path.read_text()) for path in sorted((DATA / "model_configs").glob("*.json"))
}
SERVED = {name: config for name, config in SPELLINGS.items() if config["architectures"][0] in FAMILY_OF}
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


def test_published_spellings_are_enough() -> None:
    assert len(SERVED) >= 60


@pytest.mark.parametrize("name", SERVED)
def test_no_published_spelling_is_refused(name: str) -> None:
    config = SERVED[name]
    assert unread_fields(config, FAMILY_OF[config["architectures"][0]]) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_multiplier": 0.5}, "attention_multiplier is a field"),
        ({"residual_multiplier": 0.22}, "residual_multiplier is a field"),
        ({"use_qk_norm": True}, "use_qk_norm is a field"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "rope_scaling.alpha is a field"),
        (
            {
                "quantization_config": {
                    "quant_method": "gptq",
                    "bits": 4,
                    "transform_config": {"config_groups": {"R4": {"type": "hadamard"}}},
                }
            },
            "quantization_config.transform_config is a field",
        ),
        ({"is_causal": False}, "is_causal is a field"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "act_bits": 8}},
            "quantization_config.act_bits is",
        ),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, "a, b, c, d and 1 more are fields"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unknown_field_is_refused_by_name_in_the_plan_and_at_boot(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE | fields))
    with pytest.raises(RuntimeFailure) as at_boot:
        load_model_config(tmp_path)
    assert at_boot.value.reason is FailureReason.CHECKPOINT_INVALID
    assert f"{path}: {named}" in at_boot.value.message
    with pytest.raises(ConfigError) as of_file:
        read_shape_file(path)
    assert named in str(of_file.value)
    answer = describe({}, None, None, {"config.json": path.read_bytes()}, WeightsSummary())
    with pytest.raises(ConfigError) as inspected:
        read_inspected(answer)
    assert str(inspected.value).startswith(f"config.json: {named}")
    # An inspection that an earlier release stored has no such list: an upgrade leaves its plan alone.
    del answer["unread_fields"]
    assert read_inspected(answer).shape.num_layers == 2


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 1.0], ids=repr)
def test_what_is_off_or_neutral_is_no_problem(value: object, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE | {"residual_multiplier": value}))
    assert load_model_config(tmp_path).num_layers == 2
    answer = describe({}, None, None, {"config.json": path.read_bytes()}, WeightsSummary())
    assert "unread_fields" not in answer
    assert read_shape_file(path).num_layers == 2


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"sliding_window": 4096, "sliding_window_size": 4096}),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}}),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}),
        (
            "llama",
            {
                "quantization_config": {
                    "quant_method": "gptq",
                    "gradient_accumulate_steps": 1,
                    "act_bits": 16,
                    "act_data_type": "int",
                    "act_dynamic": True,
                    "act_group_size": 128,
                }
            },
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq", "disable_exllama": True, "fallback": "rtn"}}),
        ("llama", {"is_causal": True, "summary_type": "cls_index", "init_device": "meta"}),
    ],
    ids=["gemma-2-9b", "DeepSeek-R1-0528-Qwen3-8B", "Qwen2.5-7B-Instruct-1M", "AutoRound", "GPTQModel", "bookkeeping"],
)
def test_what_transformers_does_not_read_either_is_no_problem(family: str, fields: dict[str, Any]) -> None:
    assert unread_fields(fields, family) == []


def test_the_fields_of_a_tower_do_not_count_and_those_of_its_language_model_do(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 64, "num_hidden_layers": 2}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4}
    path.write_text(json.dumps(outer | {"text_config": text, "vision_config": {"scale": 2.0}}))
    assert load_model_config(tmp_path).num_layers == 2
    path.write_text(json.dumps(outer | {"text_config": text | {"logit_multiplier": 2.0}}))
    with pytest.raises(RuntimeFailure, match="logit_multiplier is a field"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="logit_multiplier is a field"):
        read_shape_file(path)
