"""Parameter counts from a config.json alone, against `transformers` building the model on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.read_shape import read_shape, read_shape_file
from tests.support.known_models import known_configs, known_repositories

CONFIGS = Path(__file__).resolve().parents[3] / "data" / "model_configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
# What the publishers call them, in billions: catches an error that oracle and reader would share.
BILLIONS = {
    "llama-2-7b": 6.74,
    "llama-3-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.24,
    "mistral-7b": 7.24,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "gemma-2-27b": 27.23,
    "phi-3-mini": 3.82,
    "mixtral-8x7b": 46.70,
    "qwen3-30b-a3b": 30.53,
    "deepseek-v2": 235.74,
    "deepseek-v3": 671.03,
    "gpt-neox-20b": 20.55,
}


def config(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return values


def test_there_are_twenty_models_or_more() -> None:
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_parameter_counts_are_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config(name)
    oracle_config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(oracle_config)
    counted = sum(parameter.numel() for parameter in model.parameters())  # tied weights once
    assert read_shape(config(name)).parameters.total == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameter_counts_are_those_that_the_publishers_name(name: str) -> None:
    assert read_shape(config(name)).parameters.total == pytest.approx(BILLIONS[name] * 1e9, rel=0.01)


@pytest.mark.parametrize("name", sorted({*NAMES} & {*known_configs()}))
def test_a_known_model_has_the_shape_of_its_published_config(name: str) -> None:
    assert read_shape(known_configs()[name]) == read_shape(config(name))


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-2-7b", 512 << 10),  # 2 × 32 layers × 32 heads × 128 × 2 bytes
        ("llama-3-70b", 320 << 10),
        ("llama-3.1-405b", 504 << 10),
        ("qwen2.5-7b", 56 << 10),
        ("falcon-7b", 8 << 10),  # one KV head
        ("deepseek-v3", 61 * (512 + 64) * 2),  # the latent, not the heads
    ],
)
def test_kv_bytes_per_token(name: str, bytes_per_token: int) -> None:
    assert read_shape(config(name)).kv_elements_per_token() * 2 == bytes_per_token


def test_kv_is_cut_by_ranks_until_heads_run_out_and_a_latent_never_is() -> None:
    llama, deepseek = read_shape(config("llama-3-70b")), read_shape(config("deepseek-v3"))
    whole = llama.kv_elements_per_token()
    assert [whole / llama.kv_elements_per_token(ranks) for ranks in (1, 2, 8, 16)] == [1, 2, 8, 8]
    assert deepseek.kv_elements_per_token(8) == deepseek.kv_elements_per_token()


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.8), ("deepseek-v3", 37.0), ("qwen3-30b-a3b", 3.0)])
def test_a_token_passes_only_its_own_experts(name: str, billions: float) -> None:
    assert read_shape(config(name)).active_parameters == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.parametrize(
    ("quantization", "method", "bits", "group"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ", 4, 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "AWQ", 4, 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "GPTQ", 4, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8", 8, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "NF4", 4, 64),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "FP8",
            8,
            None,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            "GPTQ",
            4,
            128,
        ),
    ],
)
def test_a_quantised_checkpoint_says_how(
    quantization: dict[str, Any], method: str, bits: int, group: int | None
) -> None:
    found = read_shape(config("llama-3-70b") | {"quantization_config": quantization}).quantization
    assert found is not None
    assert (found.method, found.bits, found.group_size) == (method, bits, group)


def test_the_language_model_of_a_model_with_a_vision_tower_is_read() -> None:
    nested = {"model_type": "gemma3", "vision_config": {"hidden_size": 9}, "text_config": config("gemma-3-1b")}
    assert read_shape(nested) == read_shape(config("gemma-3-1b"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "llama"}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": 1 << 60}, "hidden_size is 115"),
        ({"hidden_size": "many"}, "'many'"),
        ({"num_attention_heads": 3}, "no multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 7}, "must divide num_attention_heads (64)"),
        ({"quantization_config": {"quant_method": "magic"}}, "'magic'"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_sentence(values: dict[str, Any], said: str) -> None:
    broken = config("llama-3-70b") | values if values and "model_type" not in values else values
    with pytest.raises(ConfigError) as caught:
        read_shape(broken)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "said"), [("{", "not a JSON"), ("[1]", "no JSON object"), (None, "cannot be read")])
def test_a_file_that_is_no_config_is_one_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_shape_file(path)


def test_every_known_repository_has_a_shape() -> None:
    for repository in known_repositories():
        shape = known_shape(repository)
        assert shape is not None, repository
        quantised = any(word in repository.lower() for word in ("awq", "deepseek-v3", "deepseek-r1"))
        assert (shape.quantization is not None) == quantised, repository
    assert known_shape("nobody/nothing") is None
