"""What a published config.json leaves out means what the class in transformers says, in the plan and in the runtime."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.inspected_model import read_inspected
from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.model_families import FAMILIES, ClassDefaults, ModelFamily
from millstream_runtime.models.families.deepseek import DeepseekConfig
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.inspection.shape import describe
from millstream_runtime.sources.safetensors_header import WeightsSummary

# transformers names the class of the language model alone otherwise, and wrote this field otherwise before version 5.
CLASS_OF = {"gemma3": "gemma3_text"}
NAME_IN_CLASS = {("qwen3_moe", "num_experts"): "num_local_experts"}

# The `text_config` of Google's folders: what is the class's default is not there.
GEMMA3 = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "27b": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
    },
}
# Sizes as the shape of the plan and the config of the runtime name them.
SIZES = {"num_heads": "num_heads", "num_kv_heads": "num_kv_heads", "head_size": "head_dim", "vocab_size": "vocab_size"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_the_table_has_the_defaults_of_transformers(family: ModelFamily) -> None:
    values = CONFIG_MAPPING[CLASS_OF.get(family.model_type, family.model_type)]().to_dict()
    values |= {name: value for name, value in (values["rope_parameters"] or {}).items() if name == "rope_theta"}
    for field in fields(ClassDefaults):
        default = getattr(family.defaults, field.name)
        if default is not None:
            name = NAME_IN_CLASS.get((family.model_type, field.name), field.name)
            assert default == values[name], f"{family.model_type}: {field.name}"


def write(folder: Path, text: dict[str, Any]) -> dict[str, Any]:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            **text,
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("size", GEMMA3)
def test_gemma_3_as_published_is_planned_and_served_alike(size: str, tmp_path: Path) -> None:
    config = write(tmp_path, GEMMA3[size])
    expected = CONFIG_MAPPING["gemma3_text"](**config["text_config"])
    shape, served = read_shape(config), load_model_config(tmp_path)
    assert (served.num_heads, served.num_kv_heads, served.head_dim, served.vocab_size) == (
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
        expected.vocab_size,
    )
    assert {of_plan: getattr(shape, of_plan) for of_plan in SIZES} == {
        of_plan: getattr(served, of_runtime) for of_plan, of_runtime in SIZES.items()
    }
    assert served.rms_norm_eps == expected.rms_norm_eps
    assert served.tie_word_embeddings is True
    assert served.max_position_embeddings == shape.max_position_embeddings == expected.max_position_embeddings
    assert getattr(served, "query_pre_attn_scalar", None) == expected.query_pre_attn_scalar
    assert shape.windows.count(1024) == expected.layer_types.count("sliding_attention")


# What has no default, or is not left out; few layers, of which one has experts.
DEEPSEEK: dict[str, dict[str, Any]] = {
    "v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 1,
        "num_experts_per_tok": 6,
    },
    "v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 4,
    },
}


@pytest.mark.parametrize("without_bottleneck", [False, True])
@pytest.mark.parametrize("version", DEEPSEEK)
def test_a_bare_deepseek_is_planned_and_served_alike(version: str, without_bottleneck: bool, tmp_path: Path) -> None:
    config = DEEPSEEK[version] | ({"q_lora_rank": None} if without_bottleneck else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_class = CONFIG_MAPPING[config["model_type"]](**config)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(of_class).state_dict().values()
    served, shape = load_model_config(tmp_path), read_shape(config)
    assert isinstance(served, DeepseekConfig)
    assert (served.q_lora_rank, served.kv_lora_rank, served.nope_head_dim, served.value_head_dim, served.head_dim) == (
        of_class.q_lora_rank,
        of_class.kv_lora_rank,
        of_class.qk_nope_head_dim,
        of_class.v_head_dim,
        of_class.qk_rope_head_dim,
    )
    assert (served.num_experts, served.num_shared_experts, served.expert_intermediate_size) == (
        of_class.n_routed_experts,
        of_class.n_shared_experts,
        of_class.moe_intermediate_size,
    )
    assert (served.first_sparse_layer, served.num_experts_per_token) == (
        of_class.first_k_dense_replace,
        of_class.num_experts_per_tok,
    )
    assert (served.num_groups, served.top_k_groups) == (of_class.n_group or 1, of_class.topk_group or 1)
    assert shape.parameters.total == sum(tensor.numel() for tensor in tensors)
    assert shape.latent_kv_elements == sum(served.kv_shape) - 1
    answer = describe({}, None, None, {"config.json": json.dumps(config).encode()}, WeightsSummary())
    assert read_inspected(answer).shape == shape
    # An earlier release left out what has the default of its class, and read it as null: its plans stay.
    answer["config"].pop("q_lora_rank", None)
    assert read_inspected(answer).shape.parameters == read_shape(config | {"q_lora_rank": None}).parameters


def test_experts_per_token_of_deepseek_v2_have_no_default(tmp_path: Path) -> None:
    config = {name: value for name, value in DEEPSEEK["v2"].items() if name != "num_experts_per_tok"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeFailure, match="num_experts_per_tok is None; it must be a positive integer"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="num_experts_per_tok is missing"):
        read_shape(config)


def test_a_size_that_no_folder_leaves_out_is_still_missing(tmp_path: Path) -> None:
    write(tmp_path, {name: value for name, value in GEMMA3["4b"].items() if name != "num_hidden_layers"})
    with pytest.raises(Exception, match="num_hidden_layers is None"):
        load_model_config(tmp_path)


def test_the_experts_of_qwen3_are_counted_by_either_name() -> None:
    path = Path(__file__).parents[3] / "data/model_configs/qwen3-30b-a3b.json"
    config = json.loads(path.read_text())
    renamed = {**config, "num_local_experts": config["num_experts"] // 2}
    del renamed["num_experts"]
    assert read_shape(renamed).num_experts == config["num_experts"] // 2
