"""What `millstream inspect` reports of a config.json that lies is refused as the config.json itself is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.config_ranges import RANGES
from millstream_operator.catalog.inspected_model import InspectedModel, read_answer, read_inspected
from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.sources.inspection.shape import describe, to_json
from millstream_runtime.sources.safetensors_header import WeightsSummary

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "data" / "model_configs").glob("*.json"))
BY_FILE = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}


def inspected(config: dict[str, Any]) -> InspectedModel:
    """As the operator reads the termination message of an inspection Job."""
    shape = describe({"kind": "config"}, None, None, {"config.json": json.dumps(config).encode()}, WeightsSummary())
    return read_inspected(read_answer(to_json(shape)))


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        inspected(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(path for path in CONFIGS if path.stem == name).read_text(encoding="utf-8"))
    return found


@BY_FILE
def test_an_inspected_model_has_the_shape_of_its_config(path: Path) -> None:
    config = load(path.stem)
    assert inspected(config).shape == read_shape(config)


@BY_FILE
def test_every_number_out_of_its_range_is_refused_with_field_value_and_range(path: Path) -> None:
    config = load(path.stem)
    read = [name for name in RANGES if _is_read(config, name)]
    assert {"hidden_size", "vocab_size", "num_attention_heads"} <= set(read)
    for name in read:
        too_low, too_high = RANGES[name].lowest - 1, RANGES[name].highest + 1
        wrong_values: list[Any] = [too_low, too_high, 1 << 63, 10**30, -(10**30), 1.5, True, "8", {}]
        for wrong in wrong_values:
            said = refusal(config | {name: wrong})
            assert f"{name} is " in said
            assert str(wrong)[:20] in said
            assert str(RANGES[name]) in said


def _is_read(config: dict[str, Any], name: str) -> bool:
    try:
        read_shape(config | {name: "eight"})
    except ConfigError as error:
        return f": {name} is " in str(error) and str(RANGES[name]) in str(error)
    return False


@pytest.mark.parametrize("name", ["rope_theta", "rope_local_base_freq", "original_max_position_embeddings"])
@pytest.mark.parametrize("wrong", [-1, 0, -(10**40), "8"])
def test_numbers_that_only_the_runtime_computes_with_are_refused_too(name: str, wrong: object) -> None:
    assert f"{name} is " in refusal(load("gemma-3-1b") | {name: wrong})


@pytest.mark.parametrize("wrong", [[-1], [10**30], [1.5], list(range(2000)), [*range(16), -3]])
def test_a_list_of_numbers_is_not_cut_where_it_begins_to_lie(wrong: list[Any]) -> None:
    assert "mlp_only_layers is " in refusal(load("qwen3-30b-a3b") | {"mlp_only_layers": wrong})


def test_a_long_list_of_layers_is_read_whole() -> None:
    config = load("qwen3-30b-a3b") | {"mlp_only_layers": list(range(40))}
    assert inspected(config).shape == read_shape(config)
    assert inspected(config).shape != inspected(load("qwen3-30b-a3b")).shape


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_the_format_of_the_weights_is_reported_under_either_name(name: str) -> None:
    stored = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}
    config = load("llama-3-70b") | {name: stored}
    assert inspected(config).shape.quantization == read_shape(config).quantization
    stored["config_groups"] = {"group_0": GROUP | {"weights": {"num_bits": -8}}}
    assert "num_bits is -8" in refusal(config)


def test_a_number_that_did_not_fit_into_the_answer_is_not_taken_as_absent() -> None:
    """Absent, `head_dim` would be hidden_size / heads."""
    answer = json.loads(to_json(describe({}, None, None, {"config.json": b"{}"}, WeightsSummary())))
    answer["config"] = load("qwen3-32b")
    del answer["config"]["head_dim"]
    for path in ("config.head_dim", "config.text_config.head_dim"):
        with pytest.raises(ConfigError, match=re.escape(f"{path.removeprefix('config.')} was left out")):
            read_inspected(answer | {"omitted": ["quantization_config.ignore", path]})
