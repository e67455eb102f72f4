"""A config.json that lies is refused by one line with field, value and cure; no number of it is computed with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_operator.catalog.config_fields import ConfigError, UnsupportedModelError
from millstream_operator.catalog.config_ranges import RANGES
from millstream_operator.catalog.read_shape import read_shape

CONFIGS = Path(__file__).resolve().parents[3] / "data" / "model_configs"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
LARGEST_INTEGER_OF_THE_API_SERVER = (1 << 63) - 1


def config(name: str = "llama-3-70b", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return values | changes


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_shape(config(changes.pop("name", "llama-3-70b"), **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_number_that_is_read_has_a_range_and_names_field_value_and_range(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    read = [name for name in values if name in RANGES and not isinstance(values[name], list) and _is_read(values, name)]
    assert {"hidden_size", "vocab_size", "num_attention_heads"} <= set(read)
    for name in read:
        wrong_values: list[Any] = [RANGES[name].lowest - 1, RANGES[name].highest + 1, 1.5, True, "8", [], {}]
        for wrong in wrong_values:
            said = f": {name} is {wrong!r}; it must be {RANGES[name]}. Correct it"
            with pytest.raises(ConfigError, match=re.escape(said)):
                read_shape(values | {name: wrong})


def _is_read(values: dict[str, Any], name: str) -> bool:
    """Whether this family reads the field at all: Llama has no experts."""
    try:
        read_shape(values | {name: "eight"})
    except ConfigError:
        return True
    return False


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_accepted_counts_no_negative_byte_and_fits_the_api_server(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(CONFIGS.glob("*.json"))))
    values = json.loads(path.read_text(encoding="utf-8"))
    edges = [edge for one in RANGES.values() for edge in (one.lowest, one.highest)]
    for name in data.draw(st.lists(st.sampled_from(sorted(set(values) & RANGES.keys())), max_size=8)):
        values[name] = data.draw(st.sampled_from(edges) | st.integers(-2, 1 << 21))
    try:
        shape = read_shape(values | {"torch_dtype": "float32"})
    except ConfigError:
        return
    parts = [getattr(shape.parameters, name) for name in shape.parameters.__dataclass_fields__]
    assert min(parts) >= 0
    assert shape.parameters.total * 4 <= LARGEST_INTEGER_OF_THE_API_SERVER


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (AWQ | {"bits": -1}, "quantization_config.bits is -1; it must be a whole number from 2 to 8"),
        (AWQ | {"bits": 16}, "quantization_config.bits is 16"),
        ({"quant_method": "awq", "w_bit": 0}, "quantization_config.w_bit is 0"),
        (AWQ | {"group_size": 0}, "quantization_config.group_size is 0"),
        (AWQ | {"group_size": "128"}, "quantization_config.group_size is '128'"),
        (AWQ | {"group_size": 3000}, "group_size is 3000, which does not divide hidden_size of 8192"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is 0"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "rows and columns of a block"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": "yes"}, "load_in_4bit is 'yes'; it must be true or false"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": -4}}}},
            "quantization_config.config_groups.group_0.weights.num_bits is -4",
        ),
    ],
)
def test_the_numbers_of_a_quantization_have_ranges_too(quantization: dict[str, Any], said: str) -> None:
    assert said in refusal(quantization_config=quantization)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7; it must divide num_attention_heads (64)"),
        ({"num_attention_heads": 3}, "no multiple of num_attention_heads 3"),
        ({"head_dim": 8192}, "64 attention heads of 8192 are 524288 columns, and hidden_size is 8192"),
        ({"head_dim": 1}, "64 attention heads of 1 are 64 columns"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"name": "mixtral-8x7b", "num_experts_per_tok": 9}, "num_experts_per_tok is 9; the model has 8 experts"),
        ({"name": "mixtral-8x7b", "num_experts_per_tok": 0}, "num_experts_per_tok is 0; the model has 8 experts"),
        ({"name": "deepseek-v3", "n_group": 7}, "n_group is 7; it must divide n_routed_experts (256)"),
        ({"name": "deepseek-v3", "topk_group": 9}, "topk_group is 9; there are 8 groups"),
        ({"name": "deepseek-v3", "first_k_dense_replace": 62}, "first_k_dense_replace is 62; the model has 61 layers"),
        ({"name": "gpt-neox-20b", "num_attention_heads": 63}, "no multiple of num_attention_heads 63"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    assert said in refusal(**changes)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "is NVFP4"),
        ({"quant_method": "nvfp4"}, "is NVFP4"),
        ({"quant_method": "mxfp4"}, "is MXFP4"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            "is NVFP4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "is FP4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["re:.*mlp.*"]},
                    "group_1": {"weights": {"num_bits": 4, "type": "int"}, "targets": ["re:.*self_attn.*"]},
                },
            },
            "holds layers in 2 formats (FP8 of 8 bit and GPTQ of 4 bit)",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        ({"quant_method": "magic"}, "'magic'"),
    ],
)
def test_a_format_that_is_not_read_is_refused_by_name_and_says_what_to_use(
    quantization: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_shape(config(quantization_config=quantization))
    assert said in str(caught.value)
    assert "use the model's checkpoint in 16 bit or FP8" in str(caught.value)
