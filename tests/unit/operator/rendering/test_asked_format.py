"""The format that a spec names and that no inspection has seen is left to the runtime to find, or to refuse."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import WeightFormat
from tests.support.llmdeployments import manifest

CPU: dict[str, Any] = {"accelerator": {"type": "CPU"}}


def planned(facts: Facts | None = None, **spec: Any) -> Plan:
    found = decide(parse(manifest(**spec)), PlanDefaults("runtime:1"), facts or Facts())
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize("method", ["AWQ", "GGUF"])
def test_the_runtime_is_asked_for_it(method: str) -> None:
    boot = boot_config(planned(**CPU, quantization={"method": method}))
    assert boot.quantization is WeightFormat(method)
    assert boot.as_dict()["quantization"] == method


@pytest.mark.parametrize(
    "quantization", [{}, {"method": "Auto"}, {"method": "None"}, {"method": "RTN"}, {"kvCache": "INT8"}]
)
def test_without_a_method_boot_json_is_as_it_was(quantization: dict[str, Any]) -> None:
    assert "quantization" not in boot_config(planned(**CPU, quantization=quantization)).as_dict()


def test_a_model_whose_config_was_read_is_judged_by_the_planner_alone() -> None:
    shape = known_shape("Qwen/Qwen2.5-0.5B-Instruct")
    assert shape is not None
    plan = planned(Facts(shape=shape), **CPU, quantization={"method": "AWQ"})
    assert boot_config(plan).quantization is None
