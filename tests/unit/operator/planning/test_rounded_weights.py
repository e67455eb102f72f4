"""`quantization.method: FP8` of a source in 16 bits: planned as what the runtime makes of it while it loads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.facts.inspection import subjects
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import CAPABILITIES, WeightFormat
from tests.support.llmdeployments import deployment

LARGE: dict[str, Any] = {
    "accelerator": {"type": "CPU"},
    "podTemplate": {"spec": {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "64Gi"}}}]}},
}
GPU: dict[str, Any] = {"accelerator": {"type": "GPU"}, "engine": {"maxModelLen": 4096}}
FP8: dict[str, Any] = {"quantization": {"method": "FP8"}}
DATASET = {"configMapRef": {"name": "documents", "key": "a.jsonl"}}


def shape(name: str = "meta-llama/Meta-Llama-3-8B-Instruct") -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found


def decided(gpus: str | None, facts: Facts | None = None, **spec: Any) -> Plan | Infeasible:
    facts = facts or Facts(shape=shape())
    if gpus is not None:
        facts = replace(facts, inventory=inventory_of([parse_island(facts.catalog, gpus)]))
    return decide(deployment(**((LARGE if gpus is None else GPU) | spec)), PlanDefaults("image:1"), facts)


def planned(gpus: str | None, facts: Facts | None = None, **spec: Any) -> Plan:
    found = decided(gpus, facts, **spec)
    assert isinstance(found, Plan), found.message
    return found


def reason(plan: Plan) -> str:
    return next(one.reason for one in plan.reasons if one.field == "quantization")


@pytest.mark.parametrize("gpus", [None, "L4:1"])
def test_it_is_applied_and_the_plan_says_that_nothing_judged_it(gpus: str | None) -> None:
    plan = planned(gpus, **FP8)
    assert (plan.quantization, plan.requires) == ("FP8", ())
    assert plan.summary.endswith("FP8")
    assert "rounded to FP8 while they are loaded. No quality gate has judged the result" in reason(plan)


@pytest.mark.parametrize("gpus", [None, "L4:1"])
def test_the_runtime_is_asked_to_round_and_of_a_checkpoint_in_fp8_it_is_not(gpus: str | None) -> None:
    boot = boot_config(planned(gpus, **FP8))
    assert boot.quantization is WeightFormat.FP8
    assert boot.as_dict()["quantization"] == "FP8"
    stored = Facts(shape=shape("deepseek-ai/DeepSeek-V3"))
    spec = FP8 if gpus is None else FP8 | {"parallelism": {"tensor": 8}}
    resources = {"limits": {"memory": "2Ti"}}
    big: dict[str, Any] = {"podTemplate": {"spec": {"containers": [{"name": "runtime", "resources": resources}]}}}
    found = planned(gpus and "H200:8", stored, **spec, **({} if gpus else big))
    assert "quantization" not in boot_config(found).as_dict()
    assert "quantization_config" in reason(found)


@pytest.mark.parametrize("gpus", [None, "L4:1"])
def test_the_weights_are_counted_in_one_byte_each(gpus: str | None) -> None:
    rounded = planned(gpus, **FP8).memory
    spec: dict[str, Any] = {} if gpus is None else {"parallelism": {"tensor": 1}}
    plain = planned(gpus and "A100-80GB:1", **spec).memory
    assert rounded is not None
    assert plain is not None
    linear = shape().parameters.linear
    assert plain.weights_bytes - rounded.weights_bytes == pytest.approx(linear, rel=0.01)
    assert rounded.embeddings_bytes == plain.embeddings_bytes


def test_a_cpu_replica_asks_for_the_memory_of_what_it_loads() -> None:
    def mebibytes(plan: Plan) -> int:
        return int(plan.resources.requests["memory"].removesuffix("Mi"))

    rounded, plain = mebibytes(planned(None, **FP8)), mebibytes(planned(None))
    assert plain - rounded == pytest.approx(shape().parameters.linear / 2**20, abs=512)


def test_a_gpu_without_fp8_is_refused_with_what_helps() -> None:
    found = decided("A100-40GB:1", **FP8)
    assert isinstance(found, Infeasible)
    assert "FP8 needs compute capability 8.9 or newer; A100-40GB has 8.0" in found.message
    assert "quantization.method" in {fix.field for fix in found.fixes}


@pytest.mark.parametrize("gpus", [None, "L4:1"])
def test_a_gate_judges_a_folder_so_with_one_there_must_be_a_folder(gpus: str | None) -> None:
    base = {"huggingFace": {"repository": "org/base"}}
    gate: dict[str, Any] = {"quantization": {"method": "FP8", "qualityGate": {"base": base, "dataset": DATASET}}}
    plan = planned(gpus, **gate)
    assert plan.requires == ("quantization=FP8",)
    assert "set quantization.calibration" in (refusal(plan.requires) or "")
    assert "rounded" not in reason(plan)


def test_a_folder_of_the_image_is_read_before_a_gate_judges_it() -> None:
    """Of 16 bits the gate would judge those, and the pods would serve what they are rounded to."""
    gate = {"base": {"local": {"path": "base"}}, "dataset": DATASET}
    judged = deployment(quantization={"method": "FP8", "qualityGate": gate})
    assert "model" in subjects(judged, PlanDefaults("image:1"))
    assert subjects(deployment(**FP8), PlanDefaults("image:1")) == {}, "the runtime looks by itself"


def test_of_a_folder_that_was_not_read_the_plan_says_what_may_be() -> None:
    plan = planned(None, Facts(), **FP8)
    assert "or rounded to FP8 where it has 16 or 32 bits" in reason(plan)
    assert boot_config(plan).quantization is WeightFormat.FP8


@pytest.mark.parametrize("gpus", [None, "L4:1"])
def test_with_calibration_a_job_makes_it_as_before(gpus: str | None) -> None:
    made: dict[str, Any] = {"quantization": {"method": "FP8", "calibration": DATASET}}
    model = {"source": {"huggingFace": {"repository": "org/model"}}, "cache": {"size": "20Gi"}}
    plan = planned(gpus, **made, model=model)
    assert (plan.quantization, plan.requires) == ("FP8", ())
    assert plan.model_path.startswith("quantized/fp8-")
    assert "quantization" not in boot_config(plan).as_dict()
    assert "Made in the cluster" in reason(plan)


@pytest.mark.parametrize("method", ["INT8", "NF4"])
def test_other_methods_need_a_checkpoint_as_before(method: str) -> None:
    assert planned("L4:1", quantization={"method": method}).requires == (f"quantization={method}",)


@pytest.mark.parametrize("spec", [{}, {"quantization": {"method": "Auto"}}])
def test_without_a_method_nothing_is_rounded_and_the_plan_says_how_to_have_it(spec: dict[str, Any]) -> None:
    """Two L4 hold the model in 16 bits, one would hold it in FP8: what was planned stays planned."""
    plan = planned("L4:4", Facts(shape=shape("meta-llama/Llama-2-13b-hf")), **spec)
    assert plan.quantization == "None"
    assert "quantization" not in boot_config(plan).as_dict()
    (line,) = [one for one in plan.rejected if one.summary == "FP8 weights"]
    assert "set quantization.method FP8 to have it" in line.reason


def test_a_draft_of_16_bits_is_not_rounded() -> None:
    """No field of the runtime asks for that, so a spec that does is refused."""
    facts = Facts(shape=shape(), draft_shape=shape("meta-llama/Llama-3.2-1B-Instruct"), draft_is_inspected=True)
    draft = {"source": {"huggingFace": {"repository": "org/draft"}}, "quantizationMethod": "FP8"}
    found = decided("L4:1", facts, speculation={"draftModel": draft})
    assert isinstance(found, Infeasible)
    assert found.message.startswith("speculation.draftModel.quantizationMethod is FP8")


def test_a_runtime_that_cannot_is_not_asked() -> None:
    older = replace(CAPABILITIES, rounded_quantization_methods=frozenset())
    plan = planned("L4:1", Facts(shape=shape(), runtime=older), **FP8)
    assert plan.requires == ("quantization=FP8",)
    assert boot_config(plan).quantization is None
