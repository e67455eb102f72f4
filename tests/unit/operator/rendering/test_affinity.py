"""`podTemplate.spec.affinity`: refused where the API server would refuse it, and rendered next to the planned GPU."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.load import ManifestError, parse
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.facts.inspection import subjects
from millstream_operator.inventory.node_affinity import REQUIRED
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.rendering.inspect_job import inspect_job
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from tests.support.gpu_nodes import spec_on_gpu
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
IMAGE = "registry.example.com/runtime:1"
PREFERRED = REQUIRED.replace("required", "preferred")
ZONE_A: Manifest = {"key": "zone", "operator": "In", "values": ["a"]}
FAST: Manifest = {"key": "disk", "operator": "Exists"}
AWAY: Manifest = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "batch"}}}


def on_nodes(*terms: list[Manifest]) -> Manifest:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}}}


def spec(affinity: Manifest | None, **fields: Any) -> Manifest:
    pod: Manifest = {"podTemplate": {"spec": {"affinity": affinity}}} if affinity is not None else {}
    return manifest(**pod, **fields)


def rendered(affinity: Manifest | None, *, on_gpu: bool = True) -> Manifest:
    fields = spec_on_gpu(accelerator={"type": "GPU", "products": ["L4"]}) if on_gpu else {}
    owner = parse(spec(affinity, **fields))
    part = load_catalog().get("L4-24GB")
    assert part is not None
    facts = Facts(inventory=inventory_of([(part, 1)])) if on_gpu else Facts()
    plan = decide(owner, PlanDefaults(IMAGE), facts)
    assert isinstance(plan, Plan)
    found: Manifest = pod_template(owner, plan, PodDefaults())["spec"].get("affinity", {})
    return found


def terms_of(affinity: Manifest) -> list[list[Manifest]]:
    terms = affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    return [term["matchExpressions"] for term in terms]


def test_without_it_the_planned_gpu_alone_is_required() -> None:
    (only,) = terms_of(rendered(None))
    assert [one["key"] for one in only] == ["nvidia.com/gpu.product"]
    assert rendered(None, on_gpu=False) == {}


def test_the_planned_gpu_is_required_in_each_of_several_alternatives() -> None:
    """The terms are ORed: one without the GPU would let the pod onto any node of that zone."""
    product = terms_of(rendered(None))[0][0]
    assert terms_of(rendered(on_nodes([ZONE_A], [FAST]))) == [[ZONE_A, product], [FAST, product]]


def test_preferences_and_other_pods_are_kept() -> None:
    given = {
        "nodeAffinity": {PREFERRED: [{"weight": 5, "preference": {"matchExpressions": [FAST]}}]},
        "podAffinity": {PREFERRED: [{"weight": 5, "podAffinityTerm": AWAY}]},
        "podAntiAffinity": {REQUIRED: [AWAY]},
    }
    found = rendered(given)
    assert found["podAntiAffinity"] == given["podAntiAffinity"]
    assert found["podAffinity"] == given["podAffinity"]
    assert found["nodeAffinity"][PREFERRED] == given["nodeAffinity"][PREFERRED]
    assert len(terms_of(found)) == 1
    assert rendered(given, on_gpu=False) == given


def test_on_a_cpu_it_is_rendered_as_it_is() -> None:
    assert rendered(on_nodes([ZONE_A]), on_gpu=False) == on_nodes([ZONE_A])


def test_the_job_that_inspects_the_model_runs_on_these_nodes_wherever_other_pods_are() -> None:
    owner = parse(spec({**on_nodes([ZONE_A]), "podAntiAffinity": {REQUIRED: [AWAY]}}, **spec_on_gpu()))
    job = inspect_job(owner, subjects(owner, PlanDefaults(IMAGE))["model"], IMAGE, PodDefaults())
    assert job["spec"]["template"]["spec"]["affinity"] == on_nodes([ZONE_A])


def test_a_spec_without_it_has_the_hash_that_it_had() -> None:
    assert input_hash(parse(manifest())) == input_hash(parse(manifest(podTemplate=None)))
    assert input_hash(parse(spec(on_nodes([ZONE_A])))) != input_hash(parse(manifest()))


@pytest.mark.parametrize(
    ("affinity", "path"),
    [
        ({"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}, f"nodeAffinity.{REQUIRED}.nodeSelectorTerms"),
        (on_nodes([]), f"nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions"),
        (on_nodes([ZONE_A | {"operator": "in"}]), "matchExpressions[0].operator"),
        (on_nodes([ZONE_A | {"values": ["a b"]}]), "matchExpressions[0].values[0]"),
        (on_nodes([ZONE_A | {"key": "a b"}]), "matchExpressions[0].key"),
        (on_nodes([FAST | {"values": ["a"]}]), "matchExpressions[0]"),
        (on_nodes([FAST | {"operator": "Gt"}]), "matchExpressions[0]"),
        (
            {"nodeAffinity": {PREFERRED: [{"weight": 101, "preference": {"matchExpressions": [FAST]}}]}},
            f"{PREFERRED}[0].weight",
        ),
        ({"podAffinity": {PREFERRED: [{"weight": 0, "podAffinityTerm": AWAY}]}}, f"{PREFERRED}[0].weight"),
        ({"podAntiAffinity": {REQUIRED: [{"labelSelector": {}}]}}, f"podAntiAffinity.{REQUIRED}[0].topologyKey"),
        ({"podAntiAffinity": {REQUIRED: [AWAY | {"topologyKey": ""}]}}, "topologyKey"),
        ({"podAntiAffinity": {REQUIRED: [AWAY | {"namespaces": ["A"]}]}}, "namespaces[0]"),
        ({"podAffinity": {REQUIRED: [AWAY] * 9}}, f"podAffinity.{REQUIRED}"),
        ({"podAffinity": {REQUIRED: [AWAY | {"matchLabelKeys": ["x"]}]}}, "matchLabelKeys"),
    ],
)
def test_what_the_api_server_would_refuse_is_refused_with_its_path(affinity: Manifest, path: str) -> None:
    with pytest.raises(ManifestError) as refused:
        parse(spec(affinity))
    assert "spec.podTemplate.spec.affinity" in str(refused.value)
    assert path in str(refused.value)
