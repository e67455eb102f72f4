"""The planner and the runtime read the same sliding windows from a config.json, also through an inspection's answer."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.inspected_model import read_answer, read_inspected
from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.layer_windows import FULL, SLIDING
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.inspection.shape import describe, to_json
from millstream_runtime.sources.safetensors_header import WeightsSummary

pytestmark = pytest.mark.deep

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
    },
    "gemma2": {"architectures": ["Gemma2ForCausalLM"]},
    "gemma3_text": {"architectures": ["Gemma3ForCausalLM"]},
}
MIXED = [SLIDING, SLIDING, FULL] * 2 + [SLIDING, SLIDING]
FIELDS: dict[str, tuple[Any, ...]] = {
    "sliding_window": ("absent", None, 1, 512, 1 << 20),
    "use_sliding_window": ("absent", None, False, True),
    "layer_types": ("absent", None, MIXED, [FULL] * 8, [SLIDING] * 8),
    "num_hidden_layers": (8, 24),
}
OF_FAMILY: dict[str, tuple[str, tuple[Any, ...]]] = {
    "qwen2": ("max_window_layers", ("absent", 0, 3, 100)),
    "qwen3": ("max_window_layers", ("absent", 0, 3, 100)),
    "gemma3_text": ("sliding_window_pattern", ("absent", None, 1, 2, 6)),
}


WEIGHTS = WeightsSummary()


def configs(family: str) -> Iterator[dict[str, Any]]:
    """Every combination of values of the fields that decide about windows."""
    name, values = OF_FAMILY.get(family, ("max_window_layers", ("absent",)))
    fields = FIELDS | {name: values}
    if family == "llama":  # refuses a window
        del fields["sliding_window"]
    for chosen in itertools.product(*fields.values()):
        given = {name: value for name, value in zip(fields, chosen, strict=True) if value != "absent"}
        if given.get("layer_types"):
            given["layer_types"] = given["layer_types"] * (given["num_hidden_layers"] // 8)
        yield BASE | {"model_type": family} | FAMILIES[family] | given


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planner_counts_the_windows_that_the_runtime_computes_with(family: str, tmp_path: Path) -> None:
    seen = set()
    for config in configs(family):
        text = json.dumps(config)
        (tmp_path / "config.json").write_text(text)
        by_runtime = Counter(load_model_config(tmp_path).windows)
        answer = to_json(describe({"kind": "path", "path": "x"}, None, None, {"config.json": text.encode()}, WEIGHTS))
        for shape in (read_shape(config), read_inspected(read_answer(answer)).shape):
            assert dict(shape.windowed_layers) == by_runtime, config
            assert Counter(shape.windows) == by_runtime
        seen.add(len(by_runtime))
    kinds = {"llama": {0}, "phi3": {0, 1}, "mixtral": {0, 1}, "qwen3_moe": {0, 1}}
    assert seen == kinds.get(family, {0, 1, 2}), "the configs must show what the family can do"


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("gemma2", {"layer_types": [SLIDING] * 7}, "layer_types"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 8}, "layer_types"),
        ("gemma2", {"layer_types": [SLIDING] * 23, "num_hidden_layers": 24}, "layer_types"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("gemma3_text", {"sliding_window": -1}, "sliding_window is -1"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096'"),
        ("mistral", {"sliding_window": True}, "sliding_window is True"),
        ("phi3", {"sliding_window": 1 << 40}, "sliding_window is 1099511627776"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
    ],
)
def test_windows_that_cannot_be_are_refused_by_both_in_one_sentence(
    family: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = BASE | {"model_type": family} | FAMILIES[family] | fields
    text = json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RuntimeFailure) as by_runtime:
        load_model_config(tmp_path)
    answer = to_json(describe({"kind": "path", "path": "x"}, None, None, {"config.json": text.encode()}, WEIGHTS))
    with pytest.raises(ConfigError) as by_planner:
        read_shape(config)
    with pytest.raises(ConfigError) as by_inspection:
        read_inspected(read_answer(answer))
    for caught in (by_runtime, by_planner):
        assert named in str(caught.value)
    assert named.split()[0] in str(by_inspection.value)
    assert "\n" not in str(by_planner.value)
