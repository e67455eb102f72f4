"""A Job that quantizes or judges computes on CPUs: which GPUs are free does not make another Job of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.pod_resources import replica_resources
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.preparation_job import Step, StepKind, preparation_job
from tests.support.llmdeployments import deployment
from tests.support.prepared_models import CACHE, CALIBRATED, GATE

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
OWNER = deployment(
    model={"source": {"huggingFace": {"repository": MODEL}}} | CACHE,
    quantization=CALIBRATED | {"qualityGate": GATE},
    accelerator={"type": "GPU"},
)


def job(kind: StepKind, gpus: int, *, inspected: bool = True) -> dict[str, Any]:
    """The Job where the plan has so many GPUs per replica."""
    shape = known_shape(MODEL)
    assert shape is not None
    facts = Facts(shape=shape)
    resources, _ = replica_resources(OWNER.spec, facts, gpus, gpus)
    plan: Plan = replace(plan_from_spec(OWNER, PlanDefaults("runtime:1"), facts), resources=resources)
    source = InspectedModel(shape, "a" * 40, 16_000_000_000) if inspected else None
    return preparation_job(OWNER, Step(kind, "0123456789"), plan, source, PodDefaults())


@pytest.mark.parametrize("kind", [StepKind.QUANTIZE, StepKind.JUDGE])
def test_the_job_is_the_same_however_many_gpus_are_planned(kind: StepKind) -> None:
    assert job(kind, 1) == job(kind, 4)


@pytest.mark.parametrize("inspected", [True, False])
def test_it_asks_for_no_gpu(inspected: bool) -> None:
    (container,) = job(StepKind.JUDGE, 2, inspected=inspected)["spec"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert container["resources"]["requests"]["cpu"] == "1"
