"""No edit is offered of which a part alone is accepted; and nodes that labels or taints keep away have an edit."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import ManifestError, parse
from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.inventory.nodes import read_node
from millstream_operator.kube.index import Index
from millstream_operator.planning.plan import Fix, Infeasible, Plan
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.pod_defaults import PodDefaults
from tests.support.fix_trials import merged
from tests.support.gpu_nodes import A100, gpu_node, spec_on_gpu
from tests.support.infeasible_specs import draw
from tests.support.llmdeployments import deployment, manifest
from tests.unit.operator.planning.cases import DEFAULTS, LLAMA_70B

Manifest = dict[str, Any]
SELECTOR, TOLERATIONS = "podTemplate.spec.nodeSelector", "podTemplate.spec.tolerations"
TAINT = {"key": "team", "value": "search", "effect": "NoSchedule"}


def planned(owner: LLMDeployment, nodes: Sequence[Manifest], pods: PodDefaults | None = None) -> Plan | Infeasible:
    """As the operator plans in a cluster of these nodes."""
    facts = ClusterFacts(Index(), pods)
    facts.problem = None
    facts.replace_nodes(filter(None, map(read_node, nodes)))
    return decide(owner, DEFAULTS, facts.of(owner))


def is_accepted(spec: Manifest, nodes: Sequence[Manifest]) -> bool:
    """Whether an LLMDeployment is planned on GPUs that are there now."""
    try:
        found = planned(parse(spec), nodes)
    except ManifestError:
        return False
    return isinstance(found, Plan) and not found.requires and not found.waits and found.product is not None


def parts(patch: Any, path: tuple[str, ...] = ()) -> Iterator[Manifest]:
    """A merge patch as one patch for each field."""
    if isinstance(patch, dict) and patch:
        for name, value in patch.items():
            yield from parts(value, (*path, name))
        return
    found = patch
    for name in reversed(path):
        found = {name: found}
    yield found


def test_no_part_of_an_edit_is_accepted_alone() -> None:
    """A second field that is not needed is a change for nothing."""
    tried = 0
    for drawn in itertools.islice(draw(1), 30):
        found = planned(parse(drawn.manifest), drawn.nodes)
        for fix in found.fixes if isinstance(found, Infeasible) else ():
            if fix.adds_nodes or fix.patch is None:
                continue
            every = list(parts(json.loads(fix.patch)))
            for some in itertools.chain.from_iterable(itertools.combinations(every, n) for n in range(1, len(every))):
                edited = copy.deepcopy(drawn.manifest)
                for one in some:
                    edited = merged(edited, one)
                tried += 1
                assert not is_accepted(edited, drawn.nodes), f"{drawn.number}: {some} of {fix.patch}"
    assert tried >= 10


def test_where_less_of_one_kind_of_load_does_the_other_stays() -> None:
    load = {"requestsPerMinute": 180, "concurrency": 5000}
    owner = deployment(**spec_on_gpu(workload=load))
    found = planned(owner, [gpu_node("a")])
    assert isinstance(found, Infeasible)
    edits = [json.loads(fix.patch)["spec"] for fix in found.fixes if fix.patch and fix.field.startswith("workload")]
    assert [list(one["workload"]) for one in edits] == [["concurrency"]]


NODES = [gpu_node("a", A100, 4, labels={"zone": "b"}, taints=[TAINT])]  # in zone b; a team has tainted it


def of_70b(**pod: Any) -> Manifest:
    model = {"source": {"huggingFace": {"repository": LLAMA_70B}}}
    return manifest(model=model, accelerator={"type": "GPU"}, podTemplate={"spec": pod})


def fixes_of(pods: PodDefaults | None = None, **pod: Any) -> list[Fix]:
    found = planned(parse(of_70b(**pod)), NODES, pods)
    assert isinstance(found, Infeasible)
    return [fix for fix in found.fixes if not fix.adds_nodes]


def tolerating(*others: Manifest) -> list[Manifest]:
    return [*others, {"key": "team", "operator": "Equal", "value": "search", "effect": "NoSchedule"}]


@pytest.mark.parametrize(
    ("pod", "field", "spec"),
    [
        ({"nodeSelector": {"zone": "b"}}, TOLERATIONS, {"tolerations": tolerating()}),
        ({"nodeSelector": {"zone": "a"}, "tolerations": tolerating()}, SELECTOR, {"nodeSelector": None}),
        (
            {"nodeSelector": {"zone": "a", "nvidia.com/gpu.product": A100}, "tolerations": tolerating()},
            SELECTOR,
            {"nodeSelector": {"zone": None}},
        ),
        (
            {"nodeSelector": {"zone": "a"}},
            f"{SELECTOR}, {TOLERATIONS}",
            {"nodeSelector": None, "tolerations": tolerating()},
        ),
    ],
)
def test_labels_and_taints_that_keep_the_pods_away_have_an_edit(pod: Manifest, field: str, spec: Manifest) -> None:
    (fix,) = fixes_of(**pod)
    assert fix.field == field
    assert fix.patch is not None
    assert json.loads(fix.patch) == {"spec": {"podTemplate": {"spec": spec}}}
    assert not is_accepted(of_70b(**pod), NODES)
    assert is_accepted(merged(of_70b(**pod), json.loads(fix.patch)), NODES)


def test_a_label_that_the_charts_defaults_select_by_is_not_the_specs_to_change() -> None:
    assert fixes_of(PodDefaults(node_selector={"zone": "a"}), tolerations=tolerating()) == []
