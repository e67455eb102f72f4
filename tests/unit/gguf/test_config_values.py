"""A GGUF file's metadata as a config.json: what is missing, impossible or not supported is named by its field."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.gguf.config_values import config_values
from millstream_runtime.gguf.header import GgufTensor

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 8192,
    "llama.embedding_length": 4096,
    "llama.block_count": 32,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 128,
    "tokenizer.ggml.eos_token_id": 9,
    "tokenizer.ggml.eot_token_id": 7,
}


def tensors(**more: str) -> dict[str, GgufTensor]:
    """Name to type; every tensor is the embedding's size."""
    found = {"model.embed_tokens.weight": "Q6_K", "lm_head.weight": "Q6_K", **more}
    return {name: GgufTensor(name, (1000, 4096), BLOCK_TYPES[kind], 0, 0) for name, kind in found.items()}


def values(changes: dict[str, Any], **more: str) -> dict[str, Any]:
    metadata = {name: value for name, value in (LLAMA | changes).items() if value is not None}
    return config_values(metadata, tensors(**more), "m.gguf")


def test_the_fields_of_a_llama() -> None:
    found = values({}, **{"model.layers.0.mlp.up_proj.weight": "Q4_K", "model.layers.0.mlp.down_proj.weight": "F16"})
    assert found == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 500000.0,
        "eos_token_id": [7, 9],
        "quantization_config": {
            "quant_method": "gguf",
            "elements": {"F16": 4096000, "Q4_K": 4096000},
            "modules": {"model.layers.0.mlp.up_proj": "Q4_K"},
        },
    }


def test_plain_numbers_are_no_quantization() -> None:
    assert values({}, **{"model.layers.0.mlp.up_proj.weight": "BF16"})["quantization_config"] is None


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 2048,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        ),
    ],
)
def test_rotary_scaling(scaling: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert values(scaling).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba'"),
        ({"general.architecture": None}, "general.architecture 'missing'"),
        ({"llama.expert_count": 8}, "llama.expert_count 8"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ({"llama.rope.dimension_count": 64}, "llama.rope.dimension_count 64"),
        ({"llama.attention.value_length": 64}, "llama.attention.value_length 64"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeFailure) as refused:
        values(changes)
    assert refused.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": 7}, "general.architecture 7; it must be a text"),
        ({"llama.block_count": None}, "llama.block_count missing; it must be a whole number"),
        ({"llama.block_count": 0}, "llama.block_count 0"),
        ({"llama.block_count": 1 << 40}, "llama.block_count 1099511627776"),
        ({"llama.block_count": "32"}, "llama.block_count '32'"),
        ({"llama.attention.head_count": [32, 16]}, "llama.attention.head_count [32, 16]"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon nan; it must be a positive number"),
        ({"llama.rope.freq_base": float("inf")}, "llama.rope.freq_base inf"),
        ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base -1.0"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor missing"),
    ],
)
def test_what_is_impossible_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeFailure) as refused:
        values(changes)
    assert refused.value.reason is FailureReason.CHECKPOINT_INVALID
    assert words in refused.value.message


def test_a_list_of_equal_numbers_is_one_number() -> None:
    assert values({"llama.attention.head_count_kv": [8] * 32})["num_key_value_heads"] == 8


def test_a_file_without_an_embedding_is_refused() -> None:
    with pytest.raises(RuntimeFailure, match=r"no tensor token_embd\.weight"):
        config_values(LLAMA, {}, "m.gguf")
