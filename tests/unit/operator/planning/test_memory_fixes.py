"""The memory limit that a refused CPU plan offers is the least that holds the model as it is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.made_model import as_four_bit
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from tests.support.llmdeployments import deployment

DATASET = {"configMapRef": {"name": "documents", "key": "a.jsonl"}}
HUB = {"source": {"huggingFace": {"repository": "org/model"}}, "cache": {"size": "60Gi"}}


def large() -> ModelShape:
    found = known_shape("meta-llama/Meta-Llama-3-8B-Instruct")
    assert found is not None
    return found


def made(method: str) -> dict[str, Any]:
    return {"quantization": {"method": method, "calibration": DATASET}, "model": HUB}


CASES: dict[str, tuple[dict[str, Any], ModelShape]] = {
    "float32": ({}, large()),
    "rounded to FP8": ({"quantization": {"method": "FP8"}}, large()),
    "stored as AWQ": ({"quantization": {"method": "AWQ"}}, as_four_bit(large())),
    "keys and values in INT8": ({"quantization": {"method": "FP8", "kvCache": "INT8"}}, large()),
    **{f"made as {method}": (made(method), large()) for method in ("RTN", "AWQ", "GPTQ", "INT8", "FP8", "NF4", "GGUF")},
}


def decided(spec: dict[str, Any], shape: ModelShape, gibibytes: int) -> Plan | Infeasible:
    limited = [{"name": "runtime", "resources": {"limits": {"memory": f"{gibibytes}Gi"}}}]
    owner = deployment(podTemplate={"spec": {"containers": limited}}, **spec)
    return decide(owner, PlanDefaults("image:1"), Facts(shape=shape))


@pytest.mark.parametrize("name", CASES)
def test_the_limit_that_is_offered_is_enough_and_a_gibibyte_less_is_not(name: str) -> None:
    spec, shape = CASES[name]
    refused = decided(spec, shape, 2)
    assert isinstance(refused, Infeasible)
    (offered,) = (int(fix.value.removesuffix("Gi")) for fix in refused.fixes if fix.field.endswith("limits.memory"))
    enough = decided(spec, shape, offered)
    assert isinstance(enough, Plan)
    assert enough.requires == ()
    assert isinstance(decided(spec, shape, offered - 1), Infeasible)


def test_the_message_names_the_weights_and_what_they_lack() -> None:
    as_fp8, as_stored = (decided(spec, large(), 2) for spec in ({"quantization": {"method": "FP8"}}, {}))
    assert isinstance(as_fp8, Infeasible)
    assert isinstance(as_stored, Infeasible)
    assert "next to its FP8 weights" in as_fp8.message
    assert "next to its BF16 weights" in as_stored.message


def test_where_gpus_are_not_known_the_message_names_the_bytes_of_the_format() -> None:
    facts = replace(Facts(shape=known_shape("meta-llama/Meta-Llama-3-70B-Instruct")), inventory=None)
    specs: list[dict[str, Any]] = [{}, {"quantization": {"method": "FP8"}}]
    in_16_bits, in_fp8 = (
        decide(deployment(accelerator={"type": "GPU"}, **spec), PlanDefaults("image:1"), facts) for spec in specs
    )
    assert isinstance(in_16_bits, Infeasible)
    assert isinstance(in_fp8, Infeasible)
    assert "141.1 GB of weights" in in_16_bits.message
    assert "72.7 GB of weights" in in_fp8.message
