"""Every field that the planner reads changes what is planned or applied, or is refused by name. None is ignored."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError, parse
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from millstream_operator.planning.scaling_cost import planned_with_scaling_cost
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.pod_defaults import PodDefaults
from tests.support.pinned_plans import choose
from tests.unit.operator.planning.cases import CASES, FIRST_RUNTIME

DEFAULTS = PlanDefaults("registry.example.com/runtime:1.0")
HUB = {"huggingFace": {"repository": "casperhansen/llama-3-8b-instruct-awq"}}
LOCAL = {"local": {"path": "demo"}}


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "demo", "namespace": "team", "uid": "u", "generation": 1},
        "spec": {"model": {"source": LOCAL}, **spec},
    }


def applied(**spec: Any) -> Any:
    """The pods that would be made; raises PlanRefused where none may be."""
    facts = Facts(runtime=FIRST_RUNTIME, choosable=FIRST_RUNTIME)
    return choose(parse(manifest(**spec)), DEFAULTS, PodDefaults(), [], facts).revision.template


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "huggingFace": ({"model": {"source": HUB}}, "source=huggingFace"),
    "volume": ({"model": {"source": {"persistentVolumeClaim": {"claimName": "m"}}}}, "source=persistentVolumeClaim"),
    "configMapRef": ({"model": {"source": LOCAL, "configMapRef": {"name": "m", "key": "c"}}}, "configMapRef"),
    "tensor": ({"parallelism": {"tensor": 2}}, "tensorParallelSize=2"),
    "pipeline": ({"parallelism": {"pipeline": 2}}, "pipelineParallelSize=2"),
    "method": ({"quantization": {"method": "AWQ"}}, "quantization=AWQ"),
    "kvCache": ({"quantization": {"kvCache": "FP8"}}, "kvCache=FP8"),
    "n-grams": ({"speculation": {"method": "NGram"}}, "speculation=NGram"),
    "draft": ({"speculation": {"draftModel": {"source": LOCAL}}}, "speculation=DraftModel"),
    "objectives": ({"objectives": {"ttft": {"p95": "200ms"}}}, "inventory"),
    "budget": ({"budget": {"maxMonthlyUSD": 100}}, "inventory"),
    "load": ({"workload": {"requestsPerMinute": 10}}, "inventory"),
    "lengths": ({"workload": {"inputTokens": 10}}, "inventory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name_and_never_rendered(name: str) -> None:
    spec, requirement = REFUSED[name]
    with pytest.raises(PlanRefused) as caught:
        applied(**spec)
    assert caught.value.problem.reason is Reason.UNSUPPORTED_BY_RUNTIME
    assert f"({requirement})" in caught.value.problem.message
    assert caught.value.plan is not None
    assert requirement in caught.value.plan["requires"]


@pytest.mark.parametrize(
    "spec",
    [
        {"tier": "Mid"},
        {"workload": {"profile": "Batch"}},
        {"accelerator": {"products": ["A100-80GB"]}},
        {"accelerator": {"products": ["Some-New-Label"]}},
    ],
)
def test_what_can_be_run_changes_the_pods(spec: dict[str, Any]) -> None:
    assert applied(**spec) != applied()


@pytest.mark.parametrize(
    "spec",
    [
        {"quantization": {"method": "None", "kvCache": "None"}},
        {"quantization": {"method": "Auto", "kvCache": "Auto"}},
        {"speculation": {"method": "Disabled"}},
        {"parallelism": {"tensor": 1, "pipeline": 1}},
    ],
)
def test_saying_what_is_the_default_changes_nothing(spec: dict[str, Any]) -> None:
    assert applied(**spec) == applied()


def test_products_become_a_demand_on_nodes() -> None:
    affinity = applied(accelerator={"products": ["A100-80GB", "L4"]})["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    assert expression["key"] == "nvidia.com/gpu.product"
    assert {"NVIDIA-A100-SXM4-80GB", "NVIDIA-L4"} <= set(expression["values"])
    assert "affinity" not in applied()["spec"]


def test_an_infeasible_plan_is_refused_with_what_would_do() -> None:
    case = CASES["no-memory-70b-on-one-a100"]
    with pytest.raises(PlanRefused) as caught:
        choose(case.deployment(), DEFAULTS, PodDefaults(), [], case.facts())
    assert caught.value.problem.reason is Reason.INFEASIBLE
    assert "gpus: A100-80GB:4" in caught.value.problem.message
    over = CASES["no-budget"]
    with pytest.raises(PlanRefused) as caught:
        choose(over.deployment(), DEFAULTS, PodDefaults(), [], over.facts())
    assert caught.value.problem.reason is Reason.BUDGET_EXCEEDED


# What a field alone changes in a plan of an 8B model on four L4, where model and GPUs are known.
PLANNED: dict[str, dict[str, Any]] = {
    "tier": {"tier": "Startup"},
    "profile": {"workload": {"profile": "Batch"}},
    "inputTokens": {"workload": {"inputTokens": 4000}},
    "outputTokens": {"workload": {"outputTokens": 2000}},
    "requestsPerMinute": {"workload": {"requestsPerMinute": 200}},
    "concurrency": {"workload": {"concurrency": 100}},
    "ttft": {"objectives": {"ttft": {"p95": "100ms"}}},
    "itl": {"objectives": {"itl": {"p95": "60ms"}}},
    "budget": {"budget": {"maxMonthlyUSD": 10}},
    "observed budget": {"budget": {"maxMonthlyUSD": 10, "enforcement": "Observe"}},
    "products": {"accelerator": {"products": ["A10G"]}},
    "tensor": {"parallelism": {"tensor": 4}},
    "pipeline": {"parallelism": {"pipeline": 2}},
    "method": {"quantization": {"method": "INT8"}},
    "kvCache": {"quantization": {"kvCache": "INT8"}},
    "speculation": {"speculation": {"method": "NGram"}},
    "maxDraftTokens": {"speculation": {"method": "NGram", "maxDraftTokens": 2}},
    "prefixCaching": {"engine": {"prefixCaching": "Disabled"}},
    "maxModelLen": {"engine": {"maxModelLen": 2048}},
}


@pytest.mark.parametrize("name", PLANNED)
def test_each_field_alone_changes_the_plan(name: str) -> None:
    repository = "meta-llama/Meta-Llama-3-8B-Instruct"
    facts = replace(CASES["72b-awq-batch-l4-x4"].facts(), shape=known_shape(repository))
    before, after = (
        planned_with_scaling_cost(decide(owner, DEFAULTS, facts), owner.spec).status_plan() | {"inputHash": ""}
        for owner in (parse(manifest(**spec)) for spec in ({}, PLANNED[name]))
    )
    assert before != after
    if name == "maxDraftTokens":
        assert after["speculation"]["maxDraftTokens"] == 2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"model": {"source": {}}}, "exactly one source"),
        ({"model": {"source": LOCAL | HUB}}, "exactly one source"),
        ({"model": {"source": {"huggingFace": {"repository": "no-slash"}}}}, "org/name"),
        ({"speculation": {"method": "DraftModel"}}, "needs draftModel"),
        ({"speculation": {"method": "NGram", "draftModel": {"source": LOCAL}}}, "take no draftModel"),
        ({"speculation": {"method": "Disabled", "maxDraftTokens": 3}}, "takes no maxDraftTokens"),
        ({"speculation": {"draftModel": {"source": {}}}}, "exactly one source"),
        ({"accelerator": {"type": "CPU"}, "parallelism": {"tensor": 2}}, "are about GPUs"),
        ({"accelerator": {"type": "CPU", "products": ["L4"]}}, "are about GPUs"),
        ({"objectives": {"ttft": {"p95": "0ms"}}}, "from 1ms to 1h"),
        ({"objectives": {"itl": {"p95": "fast"}}}, "a latency such as 200ms"),
        ({"tier": "Huge"}, "Startup, Mid or Enterprise"),
        ({"parallelism": {"tensor": 0}}, "greater than or equal to 1"),
        ({"budget": {"maxMonthlyUSD": 9.5}}, "whole number"),
    ],
)
def test_a_spec_that_contradicts_itself_is_one_sentence(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse(manifest(**spec))
    assert said in str(caught.value)


def test_without_facts_nothing_changed_for_what_worked_before() -> None:
    """The demo's plan, and one plain GPU, as they were before there was a catalogue."""
    cpu = plan_from_spec(
        parse(manifest(accelerator={"type": "CPU"}, engine={"maxModelLen": 4096, "maxNumSeqs": 16})), DEFAULTS
    )
    assert (cpu.summary, cpu.engine.max_num_batched_tokens, cpu.engine.max_num_seqs) == ("CPU TP1 FP32", 2048, 16)
    assert cpu.resources.requests == {"cpu": "250m", "memory": "1024Mi", "ephemeral-storage": "256Mi"}
    assert cpu.resources.limits == {"cpu": "16", "memory": "4Gi", "ephemeral-storage": "2304Mi"}
    gpu = plan_from_spec(parse(manifest()), DEFAULTS)
    assert (gpu.summary, gpu.gpus_per_replica, gpu.requires) == ("1×GPU TP1", 1, ())
    assert gpu.engine.as_dict() == {
        "maxNumBatchedTokens": 2048,
        "maxNumSeqs": 64,
        "gpuMemoryUtilizationPercent": 90,
        "prefixCaching": "Enabled",
    }
    assert gpu.resources.limits["nvidia.com/gpu"] == "1"


def test_the_same_inputs_give_the_same_plan_and_hash() -> None:
    case = CASES["8b-load-latency-budget"]
    assert json.dumps(case.plan().status_plan()) == json.dumps(copy.deepcopy(case).plan().status_plan())


def test_every_requirement_can_be_said_in_words() -> None:
    assert refusal(()) is None
    for case in CASES.values():
        found = case.plan()
        if found.feasible:
            text = refusal(found.status_plan()["requires"])
            assert text is None or text.endswith(").")
