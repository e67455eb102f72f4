"""A GGUF file's metadata as a config.json: what is missing, impossible or not supported is named by its field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.block_types import BLOCK_TYPES
from millstream_runtime.gguf.config_values import config_values
from millstream_runtime.gguf.header import GgufTensor
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.rope_config import read_rope
from millstream_runtime.models.layers.rope import rotary_table

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

LINEAR: dict[str, Any] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}


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
        # llama.cpp reads the older name of the factor, and a factor without a type is linear.
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0, "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 1.0}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        # On cosines and sines, on top of YaRN's temperature of 0.1 ln(4) + 1.
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 0.5,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_log_multiplier": 0.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 0.5 * (1 + 0.1 * math.log(4)),
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rotary_scaling(scaling: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert values(scaling).get("rope_scaling") == expected


def rotary_of_llama_cpp(metadata: dict[str, Any], head_dim: int, positions: int) -> tuple[Any, Any]:
    """Cosines and sines `[positions, head_dim / 2]` of the file: `load_hparams` of src/llama-model.cpp, the context's
    parameters in src/llama-context.cpp, `ggml_rope_yarn_corr_dims` of ggml.c and `rope_yarn` of ggml-cpu/ops.cpp."""
    fields = {name.removeprefix("llama.rope."): value for name, value in metadata.items()}
    scale = fields.get("scaling.factor", fields.get("scale_linear", 0.0))
    kind, base = fields.get("scaling.type", "linear"), fields["freq_base"]
    freq_scale = 1.0 if scale == 0.0 or kind == "none" else 1.0 / scale
    original = fields.get("scaling.original_context_length", metadata["llama.context_length"])
    ext_factor, temperature = float(kind == "yarn"), 1.0
    if ext_factor:
        factor = 1.0 / freq_scale
        temperature = (1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0) / (1.0 + 0.1 * math.log(factor))
    temperature *= fields.get("scaling.attn_factor", 1.0)

    def corr_dim(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(corr_dim(32.0))), min(head_dim - 1, math.ceil(corr_dim(1.0)))
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    extrapolated = torch.outer(torch.arange(positions, dtype=torch.float64), base ** (-2 * pairs / head_dim))
    mix = (1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)) * ext_factor
    angles = freq_scale * extrapolated * (1 - mix) + extrapolated * mix
    if ext_factor:
        temperature *= 1.0 + 0.1 * math.log(1.0 / freq_scale)
    return angles.cos() * temperature, angles.sin() * temperature


@pytest.mark.parametrize(
    "scaling",
    [
        {"scale_linear": 4.0},
        {"scale_linear": 0.0},
        {"scaling.factor": 2.0},
        {"scaling.factor": 2.0, "scale_linear": 8.0},
        {"scaling.type": "none", "scaling.factor": 2.0},
        {"scaling.type": "linear", "scale_linear": 4.0},
        {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 2048},
        {
            "scaling.type": "yarn",
            "scaling.factor": 4.0,
            "scaling.original_context_length": 2048,
            "scaling.attn_factor": 0.7,
        },
        {"scaling.type": "yarn", "scaling.factor": 1.0, "scaling.attn_factor": 1.2},
        {"scaling.attn_factor": 1.0},
    ],
)
def test_rotary_angles_are_those_of_llama_cpp(scaling: dict[str, Any]) -> None:
    changes = {f"llama.rope.{name}": value for name, value in scaling.items()}
    rope = read_rope(Fields(Path("m.gguf"), values(changes)), 128)
    cos, signed_sin = rotary_table(rope, 128, 1024, torch.device("cpu"))
    expected_cos, expected_sin = rotary_of_llama_cpp(LLAMA | changes, 128, 1024)
    torch.testing.assert_close(cos[:, :64].double(), expected_cos, atol=2e-4, rtol=0)
    torch.testing.assert_close(signed_sin[:, 64:].double(), expected_sin, atol=2e-4, rtol=0)


def test_factors_of_pairs_with_a_scaling_on_top_are_refused() -> None:
    metadata = LLAMA | {"llama.rope.scale_linear": 4.0}
    with pytest.raises(RuntimeFailure, match=r"llama\.rope\.scaling\.type 'linear'.* none, where the file holds"):
        config_values(metadata, tensors(), "m.gguf", [1.0] * 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba'"),
        ({"general.architecture": None}, "general.architecture 'missing'"),
        ({"general.type": "imatrix"}, "general.type 'imatrix'"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, "general.type 'mmproj'"),
        ({"llama.expert_count": 8}, "llama.expert_count 8"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor 0.5"),
        (LINEAR | {"llama.rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor 0.5"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ({"llama.rope.dimension_count": 64}, "llama.rope.dimension_count 64"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "llama.rope.scaling.attn_factor 2.0"),
        ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier 0.1"),
        ({"llama.rope.scaling.alpha": 1000.0}, "llama.rope.scaling.alpha 1000.0"),
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
        ({"llama.rope.scale_linear": -2.0}, "llama.rope.scale_linear -2.0"),
        (
            LINEAR | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.0},
            "llama.rope.scaling.attn_factor 0.0",
        ),
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


def test_a_factor_next_to_factors_of_each_pair_is_refused() -> None:
    """llama.cpp divides by both; a folder of Hugging Face has no words for it."""
    metadata = LLAMA | {"llama.rope.scaling.factor": 2.0}
    with pytest.raises(RuntimeFailure, match=r"rope\.scaling\.type 'linear'"):
        config_values(metadata, tensors(), "m.gguf", [1.0] * 64)
