"""Speculation changes nothing of how a model is split over GPUs: plan, boot file and pod are those without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.kube.kinds import DEPLOYMENT
from millstream_operator.planning.facts import EVERYTHING, Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import render_revision
from millstream_operator.rendering.runtime_config import boot_config
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CATALOG = load_catalog()
# As if the runtime could draft on a GPU: this version refuses the plan, which must be right all the same.
FACTS = Facts(
    shape=known_shape(MODEL),
    draft_shape=known_shape(MODEL),
    inventory=inventory_of(parse_island(CATALOG, "A100-80GB:4") for _ in range(2)),
    catalog=CATALOG,
    runtime=EVERYTHING,
    choosable=EVERYTHING,
)


def planned(facts: Facts = FACTS, **spec: Any) -> Plan:
    owner = parse(_stored(**spec))
    found = decide(owner, PlanDefaults("registry.example.com/runtime:1"), facts)
    assert isinstance(found, Plan), found.message
    return found


def _stored(**spec: Any) -> Manifest:
    source = {"huggingFace": {"repository": MODEL}}
    split: Manifest = {"accelerator": {"type": "GPU"}, "parallelism": {"tensor": 2}, "quantization": {"method": "None"}}
    return manifest(model={"source": source}, **split, **spec)


def pod_of(plan: Plan, **spec: Any) -> Manifest:
    """The spec of the pods that the plan is rendered to."""
    owner = parse(_stored(**spec))
    made = {one["kind"]: one for one in objects(owner, render_revision(owner, plan, PodDefaults()))}
    found: Manifest = made[DEPLOYMENT.kind]["spec"]["template"]["spec"]
    return found


DRAFTS: dict[str, Manifest] = {
    "n-grams": {"method": "NGram", "maxDraftTokens": 4},
    "a draft model": {"draftModel": {"source": {"huggingFace": {"repository": MODEL}}}},
}


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_model_with_drafts_is_split_over_two_gpus_as_one_without(drafts: str) -> None:
    with_drafts, without = planned(speculation=DRAFTS[drafts]), planned(speculation={"method": "Disabled"})
    assert with_drafts.speculation.method != without.speculation.method == "Disabled"
    for plan in (with_drafts, without):
        assert plan.tensor_parallel_size == 2
        assert boot_config(plan).as_dict()["tensor_parallel_size"] == 2
    assert replace(boot_config(with_drafts), **_speculation_of(without)) == boot_config(without)


def _speculation_of(plan: Plan) -> Manifest:
    boot = boot_config(plan)
    return {name: getattr(boot, name) for name in ("speculation_method", "max_draft_tokens", "draft_model")}


def test_the_pods_have_the_same_two_gpus_and_shared_memory() -> None:
    asked: Manifest = {"speculation": DRAFTS["n-grams"]}
    (with_drafts, without) = (pod_of(planned(**spec), **spec) for spec in (asked, {}))
    container, other = with_drafts["containers"][0], without["containers"][0]
    assert container["resources"] == other["resources"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    memory = [[one for one in pod["volumes"] if "emptyDir" in one] for pod in (with_drafts, without)]
    assert memory[0] == memory[1]
    assert any(one["emptyDir"].get("medium") == "Memory" for one in memory[0])
