"""How rotary angles may be scaled: what a plan refuses and what a boot refuses are the same, for every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import UnsupportedModelError
from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.registry import load_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
NUMBERS = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3 = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}


def both(kind: str, spelling: str, config: dict[str, Any], folder: Path) -> tuple[bool, bool]:
    """Whether a plan and a boot refuse this type of scaling."""
    original = config["max_position_embeddings"] // 2
    scaling = NUMBERS | FACTORS | {spelling: kind, "original_max_position_embeddings": original}
    values = config | {"rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(values))
    return refuses(lambda: read_shape(values)), refuses(lambda: load_model_config(folder))


def refuses(read: Callable[[], object]) -> bool:
    try:
        read()
    except UnsupportedModelError as error:
        return "rope_type" in str(error)
    except RuntimeFailure as failure:
        return failure.reason is FailureReason.UNSUPPORTED_BY_RUNTIME and "rope_type" in failure.message
    return False


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [
        *((kind, False) for kind in ("default", "linear", "dynamic", "llama3", "yarn")),
        *((kind, True) for kind in ("longrope", "su", "mrope", "ntk", "proportional")),
    ],
)
def test_a_plan_refuses_what_a_boot_refuses(kind: str, is_refused: bool, spelling: str, tmp_path: Path) -> None:
    assert both(kind, spelling, BASE, tmp_path) == (is_refused, is_refused)


@pytest.mark.parametrize(
    ("kind", "is_refused"), [("longrope", False), ("su", False), ("yarn", False), ("llama3", True), ("linear", True)]
)
def test_phi3_has_types_of_its_own(kind: str, is_refused: bool, tmp_path: Path) -> None:
    assert both(kind, "type", BASE | PHI3, tmp_path) == (is_refused, is_refused)


def test_a_longrope_that_never_crosses_is_one_set_of_angles() -> None:
    """So GGUF files of Llama 3 have it."""
    length = BASE["max_position_embeddings"]
    scaling = FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": length}
    assert read_shape(BASE | {"rope_scaling": scaling}).num_layers == BASE["num_hidden_layers"]


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_the_angles_of_images_are_plain_ones_for_text(spelling: str, tmp_path: Path) -> None:
    """As Qwen2-VL is published: its fields stand outside of any text_config."""
    with_tower = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    assert both("mrope", spelling, BASE | with_tower, tmp_path) == (False, False)
    alone = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert both("mrope", spelling, BASE | alone, tmp_path) == (True, True)


def test_each_kind_of_layer_counts() -> None:
    gemma = BASE | {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "ntk"}}}
    with pytest.raises(UnsupportedModelError, match="'ntk'"):
        read_shape(gemma)
