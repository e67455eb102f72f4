"""Integers of compressed-tensors do not say by which method they were made: the spec may name any that it can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.catalog.checkpoint_quantization import read_quantization
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.choices.draft_fit import gpu_draft_problem
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from tests.support.llmdeployments import manifest

CPU: dict[str, Any] = {
    "accelerator": {"type": "CPU"},
    "podTemplate": {"spec": {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "64Gi"}}}]}},
}
WORDS = "4-bit integers of compressed-tensors (AWQ, GPTQ or RTN)"
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64}


def compressed(bits: int = 4, kind: str = "pack-quantized") -> dict[str, Any]:
    """As llm-compressor writes it, for AWQ and for GPTQ."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    if kind == "int-quantized":
        weights = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    outer = {"quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"]}
    return outer | {"config_groups": {"group_0": group}}


def llama_8b(quantization: dict[str, Any]) -> ModelShape:
    shape = known_shape("meta-llama/Meta-Llama-3-8B")
    assert shape is not None
    return replace(shape, quantization=read_quantization({"quantization_config": quantization}))


def planned(shape: ModelShape, method: str | None, gpus: str | None = None) -> Plan | Infeasible:
    spec: dict[str, Any] = CPU if gpus is None else {"accelerator": {"type": "GPU"}, "engine": {"maxModelLen": 2048}}
    spec = spec | ({} if method is None else {"quantization": {"method": method}})
    facts = Facts(shape=shape)
    if gpus is not None:
        facts = replace(facts, inventory=inventory_of([parse_island(facts.catalog, gpus)]))
    return decide(parse(manifest(**spec)), PlanDefaults("image:1"), facts)


@pytest.mark.parametrize("gpus", [None, "A100-40GB:1", "T4-16GB:1"])
@pytest.mark.parametrize("method", ["AWQ", "GPTQ", "RTN"])
def test_each_method_that_may_have_made_them_is_planned_as_what_is_stored(method: str, gpus: str | None) -> None:
    shape = llama_8b(compressed())
    plan, unnamed = planned(shape, method, gpus), planned(shape, None, gpus)
    assert isinstance(plan, Plan), plan.message
    assert isinstance(unnamed, Plan)
    assert (plan.quantization, plan.requires) == (method, ())
    assert plan.summary.endswith(method)
    assert (plan.memory, plan.engine, plan.resources) == (unnamed.memory, unnamed.engine, unnamed.resources)
    said = next(one.reason for one in plan.reasons if one.field == "quantization")
    assert f"They are {WORDS}; which method made them is not written there, and spec.quantization.method says" in said


@pytest.mark.parametrize("gpus", [None, "A100-40GB:1"])
def test_without_a_method_the_plan_keeps_its_name_and_claims_nothing(gpus: str | None) -> None:
    plan = planned(llama_8b(compressed()), "Auto", gpus)
    assert isinstance(plan, Plan)
    assert plan.quantization == "GPTQ", "as versions before called it: measurements are kept under this name"
    said = next(one.reason for one in plan.reasons if one.field == "quantization")
    assert said.startswith("The checkpoint's own quantization_config: 4 bit")
    assert f"They are {WORDS}; which method made them is not written there, and the plan calls them GPTQ." in said


@pytest.mark.parametrize("method", ["FP8", "NF4", "INT8", "GGUF", "None"])
def test_a_method_that_cannot_have_made_them_is_refused_with_those_that_can(method: str) -> None:
    found = planned(llama_8b(compressed()), method)
    assert isinstance(found, Infeasible)
    assert found.message == f"spec.quantization.method is {method}, but the checkpoint is stored as {WORDS}."
    assert "quantization.method" in str(found.fixes), "without the field it is served"


@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("method", ["INT8", "GPTQ", "AWQ", "RTN"])
def test_eight_bits_are_called_int8_whatever_made_them(method: str, kind: str) -> None:
    plan = planned(llama_8b(compressed(8, kind)), method)
    assert isinstance(plan, Plan), plan.message
    assert (plan.quantization, plan.requires) == ("INT8", ())


@pytest.mark.parametrize("stored", [AWQ, AWQ | {"quant_method": "gptq"}])
def test_what_rounding_alone_made_is_stored_in_a_format_of_another_name(stored: dict[str, Any]) -> None:
    plan = planned(llama_8b(stored), "RTN")
    assert isinstance(plan, Plan), plan.message
    assert (plan.quantization, plan.requires) == (stored["quant_method"].upper(), ())
    other = "GPTQ" if stored is AWQ else "AWQ"
    assert isinstance(planned(llama_8b(stored), other), Infeasible), "these formats say which method made them"


def test_a_source_that_is_quantized_already_is_refused_in_words_that_are_known() -> None:
    calibration = {"configMapRef": {"name": "documents", "key": "a.jsonl"}}
    model = {"source": {"local": {"path": "m"}}, "cache": {"size": "1Gi"}}
    spec = {**CPU, "model": model, "quantization": {"method": "AWQ", "calibration": calibration}}
    found = decide(parse(manifest(**spec)), PlanDefaults("image:1"), Facts(shape=llama_8b(compressed())))
    assert isinstance(found, Infeasible)
    assert f"this one is stored as {WORDS}" in found.message


@pytest.mark.parametrize("method", ["AWQ", "GPTQ", "RTN"])
def test_their_bytes_do_not_depend_on_the_name(method: str) -> None:
    shape = replace(llama_8b(compressed()), unquantized_parameters=1 << 28)
    found, stored = weight_format(shape, method), weight_format(shape, "GPTQ")
    assert (found.bits, found.group_size) == (4, 32)
    assert rank_weights(shape, found, 2) == rank_weights(shape, stored, 2)


@pytest.mark.parametrize(("method", "refused"), [("AWQ", False), ("GPTQ", False), ("RTN", False), ("FP8", True)])
def test_a_draft_may_be_named_by_any_of_them_too(method: str, refused: bool) -> None:
    source = {"huggingFace": {"repository": "org/draft"}}
    draft = {"method": "DraftModel", "draftModel": {"source": source, "quantizationMethod": method}}
    model = llama_8b(compressed())
    problem = gpu_draft_problem(parse(manifest(speculation=draft)).spec, model, model, ())
    assert (problem is not None) is refused
    assert problem is None or WORDS in problem
