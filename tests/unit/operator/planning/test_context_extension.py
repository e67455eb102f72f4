"""`engine.maxModelLen` beyond `max_position_embeddings`, where config.json has rope scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import EVERYTHING
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.planner import decide
from tests.support.known_models import known_config
from tests.unit.operator.planning.cases import DEFAULTS, Case

QWEN = "Qwen/Qwen2.5-7B-Instruct"
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}


def planned(max_model_len: int | None, *more: str, **fields: Any) -> Plan | Infeasible:
    length = [] if max_model_len is None else [f"engine: {{maxModelLen: {max_model_len}}}"]
    case = Case(QWEN, ("H100:1",), "\n".join([*length, *more]), runtime=EVERYTHING)
    config = known_config(QWEN)
    assert config is not None
    return decide(case.deployment(), DEFAULTS, replace(case.facts(), shape=read_shape(config | fields)))


def test_a_length_within_the_extension_is_planned() -> None:
    plan = planned(131072, **YARN)
    assert isinstance(plan, Plan)
    assert plan.engine.max_model_len_tokens == 131072


def test_a_length_beyond_it_is_refused_and_the_longest_is_offered() -> None:
    refused = planned(131073, **YARN)
    assert isinstance(refused, Infeasible)
    assert "engine.maxModelLen is 131073, and the model allows 131072 tokens" in refused.message
    assert ("engine.maxModelLen", "131072") in [(fix.field, fix.value) for fix in refused.fixes]
    assert isinstance(planned(32769), Infeasible), "without scaling"


def test_a_cpu_has_the_same_limit_with_the_same_words_and_fix() -> None:
    """Memory for the length is there, so its model alone refuses it."""
    memory = "{spec: {containers: [{name: runtime, resources: {limits: {memory: 200Gi}}}]}}"
    cpu = f"accelerator: {{type: CPU}}\npodTemplate: {memory}"
    on_gpu, on_cpu = planned(131073, **YARN), planned(131073, cpu, **YARN)
    assert isinstance(on_gpu, Infeasible)
    assert isinstance(on_cpu, Infeasible)
    assert (on_cpu.constraint, on_cpu.message) == (on_gpu.constraint, on_gpu.message)
    assert [(fix.field, fix.value) for fix in on_cpu.fixes] == [("engine.maxModelLen", "131072")]
    assert isinstance(planned(131072, cpu, **YARN), Plan)
    assert isinstance(planned(32769, cpu), Infeasible), "without scaling"


def test_gpus_that_are_not_known_have_the_same_limit() -> None:
    case = Case(QWEN, ("H100:1",), "engine: {maxModelLen: 32769}\nparallelism: {tensor: 2}", runtime=EVERYTHING)
    refused = decide(case.deployment(), DEFAULTS, replace(case.facts(), inventory=None))
    assert isinstance(refused, Infeasible)
    assert refused.message == "engine.maxModelLen is 32769, and the model allows 32768 tokens."


def test_a_spec_that_does_not_ask_gets_the_plan_it_had() -> None:
    assert planned(None, **YARN) == planned(None)
