"""Mistakes in a config.json that Python reads without a word: each is refused by field, value and cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_operator.catalog.config_decimals import OF_ROPE, TOP_LEVEL
from millstream_operator.catalog.config_fields import ConfigError
from millstream_operator.catalog.config_ranges import RANGES
from millstream_operator.catalog.read_shape import read_shape, read_shape_file
from millstream_operator.inventory.node_kinds import whole_catalog
from millstream_operator.planning.facts import EVERYTHING, Facts
from millstream_operator.planning.plan import Plan
from millstream_operator.planning.planner import decide
from tests.support.gpu_nodes import spec_on_gpu
from tests.support.llmdeployments import deployment
from tests.unit.operator.planning.cases import CATALOG, DEFAULTS

CONFIGS = Path(__file__).resolve().parents[3] / "data" / "model_configs"
BAD: list[Any] = [-1, 0, -0.5, 1 << 80, True, False, "8", "", [], [1], {}, {"a": 1}, float("nan"), float("inf"), -1e308]
COMPRESSED = {"quant_method": "compressed-tensors"}


def config(name: str = "llama-3-70b", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return values | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": "awq"}, "quantization_config is 'awq'; it must be an object"),
        ({"quantization_config": []}, "quantization_config is []; it must be an object"),
        ({"quantization_config": False}, "quantization_config is False; it must be an object"),
        ({"compression_config": "fp8"}, "compression_config is 'fp8'; it must be an object"),
        ({"quantization_config": {"quant_method": 4}}, "quantization_config.quant_method is '4'; known are"),
        (
            {"quantization_config": COMPRESSED | {"config_groups": {"group_0": {"weights": None}}}},
            "quantization_config.config_groups.group_0.weights is missing or null",
        ),
        (
            {"quantization_config": COMPRESSED | {"config_groups": {"group_0": {"weights": "int4"}}}},
            "quantization_config.config_groups.group_0.weights is 'int4'; it must be an object",
        ),
        (
            {"quantization_config": COMPRESSED | {"config_groups": {"group_0": 4}}},
            "quantization_config.config_groups.group_0 is 4; it must be an object",
        ),
        (
            {"quantization_config": COMPRESSED | {"config_groups": [4]}},
            "quantization_config.config_groups is [4]; it must be an object",
        ),
        ({"rope_theta": -10_000.0}, "rope_theta is -10000.0; it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "rope_scaling.factor is -2.0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        (
            {"name": "gemma-3-1b", "rope_parameters": {"full_attention": {"rope_theta": 0}}},
            "rope_parameters.full_attention.rope_theta is 0",
        ),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; it must be a number above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; it must be a number above 0"),
        ({"name": "qwen1.5-moe-a2.7b", "mlp_only_layers": [True]}, "mlp_only_layers is True"),
        ({"torch_dtype": 16}, "torch_dtype is 16; it must be a word"),
    ],
)
def test_a_value_that_would_pass_unnoticed_is_refused_by_field_value_and_cure(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_shape(config(changes.pop("name", "llama-3-70b"), **changes))
    assert said in str(caught.value)
    assert "Correct it" in str(caught.value) or "use the model's checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    ("inserted", "said"),
    [
        ('"rope_theta": NaN', "rope_theta is nan, which is no number of JSON; correct it"),
        ('"rope_scaling": {"factor": -Infinity}', "rope_scaling.factor is -inf"),
        ('"hidden_size": 1e999', "is given twice"),
        ('"rms_norm_eps": 1e999', "rms_norm_eps is inf"),
        ('"note": ' + "9" * 5000, "a number has 5000 digits; correct it"),
        ('"note": ' + "9" * 309, "a number has 309 digits; correct it"),  # float() overflows
        ('"note": ' + "[" * 5000 + "]" * 5000, "its lists or objects are nested too deeply; correct it"),
        ('"note": ' + '{"a": ' * 500 + "1" + "}" * 500, "its lists or objects are nested too deeply; correct it"),
        ('"num_hidden_layers": 8', "num_hidden_layers is given twice, as 8 and as 80; correct it"),
    ],
)
def test_what_python_reads_as_json_and_nothing_else_does_is_refused(tmp_path: Path, inserted: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text("{" + inserted + ", " + json.dumps(config())[1:], encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_shape_file(path)
    assert said in str(caught.value)


def test_a_key_that_is_given_twice_with_one_value_means_one_thing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"num_hidden_layers": 80, ' + json.dumps(config())[1:], encoding="utf-8")
    assert read_shape_file(path) == read_shape(config())


def test_the_published_files_are_all_read() -> None:
    for path in CONFIGS.glob("*.json"):
        assert read_shape_file(path).parameters.total > 0


NUMBERS = sorted({*RANGES, *TOP_LEVEL} - {"bits", "w_bit", "num_bits", "group_size", "q_group_size"})
QUANTIZED = {"quant_method": "awq", "bits": 4, "group_size": 128}
LAYERS = COMPRESSED | {"config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}, "targets": ["Linear"]}}}


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_no_mistake_gives_a_traceback_or_a_plan_without_bytes(data: st.DataObject) -> None:
    """Over each number of each family: what is accepted is planned with bytes above zero, the rest is a ConfigError."""
    values = config(data.draw(st.sampled_from(sorted(path.stem for path in CONFIGS.glob("*.json")))))
    bad = st.sampled_from(BAD)
    for name in data.draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=2)):
        values[name] = data.draw(bad)
    if data.draw(st.booleans()):
        values["rope_scaling"] = {"rope_type": "linear", data.draw(st.sampled_from(OF_ROPE)): data.draw(bad)}
    if data.draw(st.booleans()):
        changed = data.draw(st.sampled_from(["quant_method", "bits", "group_size", "modules_to_not_convert"]))
        mistakes = [QUANTIZED | {changed: data.draw(bad)}, LAYERS | {"ignore": {"Linear": -3}}]
        values["quantization_config"] = data.draw(bad | st.sampled_from(mistakes))
    try:
        shape = read_shape(values)
    except ConfigError:
        return
    assert shape.unquantized_parameters >= 0
    facts = Facts(shape=shape, inventory=whole_catalog(CATALOG), catalog=CATALOG, choosable=EVERYTHING)
    found = decide(deployment(**spec_on_gpu()), DEFAULTS, facts)
    if isinstance(found, Plan) and found.memory is not None:
        assert found.memory.weights_bytes > 0
        assert all(one >= 0 for one in found.memory.as_dict().values())
