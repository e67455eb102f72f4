"""Fixes: each that is offered is applied, as an edit or with other nodes; none is offered twice or in vain.

`python -m tests.soak.offered_fixes` tries several hundred specs; here is a sample with another seed.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from millstream_operator.planning.choices.outcome import Stage
from millstream_operator.planning.fixes.patch import kubectl_patch, merge_patch
from millstream_operator.planning.plan import Infeasible
from millstream_operator.planning.planner import decide
from millstream_runtime.config import CAPABILITIES, Capabilities
from tests.support.fix_trials import merged, try_offered_fixes
from tests.support.llmdeployments import deployment
from tests.unit.operator.planning.cases import CASES, DEFAULTS, LLAMA_70B, Case


def refused(case: Case, runtime: Capabilities = CAPABILITIES) -> Infeasible:
    """The refusal of a case where the runtime can do what this version can."""
    facts = replace(case.facts(), runtime=runtime, choosable=runtime)
    found = decide(case.deployment(), DEFAULTS, facts)
    assert isinstance(found, Infeasible)
    return found


@pytest.mark.deep
async def test_every_offered_fix_is_applied() -> None:
    trials = await try_offered_fixes(seed=7, specs=24)
    print(trials.table())
    assert trials.failures == []
    assert trials.fixes.total() >= 24
    assert set(trials.specs) <= {stage.constraint for stage in Stage}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("no-")])
def test_no_fix_is_offered_twice(name: str) -> None:
    fixes = refused(CASES[name]).fixes
    assert len({(fix.field, fix.value) for fix in fixes}) == len(fixes)
    assert len({(fix.field, fix.summary) for fix in fixes}) == len(fixes)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("no-")])
def test_a_fix_is_an_edit_or_says_that_it_needs_nodes(name: str) -> None:
    for fix in refused(CASES[name]).fixes:
        assert fix.adds_nodes == (fix.field.split(",")[0] == "gpus")
        assert fix.adds_nodes or fix.patch is not None
        if fix.patch is not None:
            assert set(json.loads(fix.patch)) == {"spec"}


def test_what_the_runtime_lacks_is_not_offered() -> None:
    """70B in 4 bit would fit on one A100, and no runtime of this version reads 4 bit."""
    fixes = refused(Case(LLAMA_70B, ("A100-80GB:1",))).fixes
    assert fixes
    assert not any("AWQ" in fix.summary or "FP8" in fix.summary or "PP" in fix.summary for fix in fixes)


def test_a_larger_and_another_gpu_are_among_the_answers() -> None:
    assert "A100-80GB:4" in {fix.value for fix in refused(Case(LLAMA_70B, ("A100-80GB:1",))).fixes}
    answers = {fix.value for fix in refused(Case(LLAMA_70B, ("L4:1",))).fixes}
    assert answers
    assert all(value.partition(":")[0] != "L4-24GB" for value in answers), "four L4 hold no 70B in 16 bit"


def test_where_no_change_helps_the_answer_names_the_gpus_and_what_this_version_lacks() -> None:
    without = replace(CAPABILITIES, quantization_methods=frozenset({"None"}))
    found = refused(Case("deepseek-ai/DeepSeek-V3", ("L4:8",)), without)
    assert found.fixes == ()
    assert found.requires == ("quantization=FP8",)
    assert "8×H200-141GB TP8 FP8" in found.message
    assert "(quantization=FP8)" in found.message


def test_two_fields_are_edited_at_once_where_one_does_not_do() -> None:
    spec = "objectives: {ttft: {p95: 20ms}, itl: {p95: 2ms}}"
    (fix, *_) = refused(Case(LLAMA_70B, ("A100-80GB:8",), spec)).fixes
    assert fix.field == "objectives.ttft.p95, objectives.itl.p95"
    assert set(json.loads(fix.patch or "{}")["spec"]["objectives"]) == {"ttft", "itl"}


def test_a_patch_is_the_difference_of_two_specs() -> None:
    before = deployment(accelerator={}, engine={"maxModelLen": 8, "maxNumSeqs": 4}, tier="Mid")
    after = deployment(accelerator={}, engine={"maxModelLen": 4, "maxNumSeqs": 4}, replicas=2)
    patch = merge_patch(before, after)
    assert patch == '{"spec":{"tier":null,"engine":{"maxModelLen":4},"replicas":2}}'
    stored = json.loads(before.model_dump_json(by_alias=True, exclude_none=True))
    assert merged(stored, json.loads(patch))["spec"] == json.loads(
        after.spec.model_dump_json(by_alias=True, exclude_none=True)
    )
    assert merge_patch(before, before) is None


def test_the_command_survives_a_shell() -> None:
    command = kubectl_patch("demo", "team", '{"spec":{"a":"it\'s"}}')
    assert command == """kubectl patch llmd demo -n team --type merge -p '{"spec":{"a":"it'"'"'s"}}'"""


def affine(*expressions: str) -> str:
    """A pod template whose required node affinity has one term per expression."""
    terms = ", ".join(f"{{matchExpressions: [{one}]}}" for one in expressions)
    required = f"requiredDuringSchedulingIgnoredDuringExecution: {{nodeSelectorTerms: [{terms}]}}"
    return f"podTemplate: {{spec: {{affinity: {{nodeAffinity: {{{required}}}}}}}}}"


PRODUCT, ZONE = "nvidia.com/gpu.product", "topology.kubernetes.io/zone"
NO_OTHER = f"{{key: {PRODUCT}, operator: In, values: [Tesla-T4]}}"


def products_to_add(template: str) -> set[str]:
    """Of the nodes that are offered for 70B on one T4."""
    fixes = refused(Case(LLAMA_70B, ("T4-16GB:1",), template)).fixes
    return {fix.value.split(",")[0].rpartition(":")[0].split(" of ")[-1] for fix in fixes if fix.adds_nodes}


@pytest.mark.parametrize(
    ("template", "offered"),
    [
        (affine(f"{{key: {PRODUCT}, operator: In, values: [NVIDIA-H200]}}"), {"H200-141GB"}),
        (f"podTemplate: {{spec: {{nodeSelector: {{{PRODUCT}: NVIDIA-H200}}}}}}", {"H200-141GB"}),
        (affine(NO_OTHER), {"T4-16GB"}),
        (affine(f"{{key: {PRODUCT}, operator: DoesNotExist}}"), set()),
    ],
    ids=["one product", "one product by nodeSelector", "the small one", "no label of a product"],
)
def test_no_gpu_is_offered_that_the_pods_own_affinity_excludes(template: str, offered: set[str]) -> None:
    assert products_to_add(template) <= offered
    assert products_to_add("") - offered, "any larger GPU without that affinity"


def test_other_labels_of_nodes_to_add_are_no_obstacle() -> None:
    """A node that is added can be labelled; an alternative that names no GPU admits every one."""
    zone = f"{{key: {ZONE}, operator: In, values: [a]}}"
    assert products_to_add(affine(NO_OTHER, zone)) == products_to_add(affine(zone)) == products_to_add("")
