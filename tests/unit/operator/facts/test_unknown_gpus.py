"""What is planned where the model's shape, or the cluster's GPUs, are not known: the table in docs/planning.md.

Each row is run with a cluster of nodes, pods and declared node pools; the table has what came out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.facts.gpu_pods import read_pod
from millstream_operator.facts.gpu_watch import DISABLED
from millstream_operator.inventory.node_pools import read_node_pools
from millstream_operator.inventory.nodes import read_node
from millstream_operator.kube.index import Index
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.revisions import plan_anew
from tests.support.gpu_nodes import A100, gpu_node, gpu_pod
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
PAGE = Path(__file__).resolve().parents[4] / "docs" / "planning.md"
HEAD = (
    "| model's shape | GPUs of the cluster | spec or chart | outcome | reason that is shown |\n|---|---|---|---|---|\n"
)
LARGE, SMALL, NOT_KNOWN = "meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "somebody/else"
POOL = '[{"product": "A100-80GB", "gpusPerNode": 8, "maxNodes": 2}]'
TAINTS = [{"key": "dedicated", "value": "search", "effect": "NoSchedule"}]
TOLERANT = {"podTemplate": {"spec": {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}}}


def unlabelled(name: str) -> Manifest:
    found = gpu_node(name, A100, 8)
    found["metadata"]["labels"] = {}
    return found


def split(name: str) -> Manifest:
    found = gpu_node(name, A100, 8)
    found["status"]["allocatable"] = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "56"}
    return found


@dataclass(frozen=True)
class Row:
    """One line of the table. `outcome`: the plan's summary, or the condition's reason; `said`: the reason shown."""

    shape: str
    gpus: str
    given: str
    outcome: str
    nodes: tuple[Manifest, ...] = ()
    pods: tuple[Manifest, ...] = ()
    spec: Manifest = field(default_factory=dict)
    repository: str = LARGE
    pools: str = ""
    problem: str | None = None
    said: str = "inventory"  # the reason of this field is shown

    def run(self) -> tuple[str, str]:
        """Return the outcome, and the reason that a person sees."""
        facts = ClusterFacts(Index(), node_pools=read_node_pools(self.pools))
        facts.problem = self.problem
        facts.replace_nodes(filter(None, map(read_node, self.nodes)))
        for pod in self.pods:
            facts.put_pod(pod["metadata"]["name"], read_pod(pod | {"metadata": pod["metadata"] | {"uid": "u"}}))
        source = {"huggingFace": {"repository": self.repository}}
        owner = parse(manifest("d", **({"model": {"source": source}, "accelerator": {}, "engine": {}} | self.spec)))
        try:
            pin = plan_anew(owner, PlanDefaults("registry/runtime:1"), PodDefaults(), [], facts.of(owner))
        except PlanRefused as refused:
            return f"refused, {refused.problem.reason}", refused.problem.message
        shown = [one["reason"] for one in pin.revision.plan["reasons"] if one["field"] == self.said]
        return f"`{pin.revision.plan['summary']}`{_waits(pin.revision)}", shown[0]

    def line(self) -> str:
        outcome, reason = self.run()
        return f"| {self.shape} | {self.gpus} | {self.given} | {outcome} | {reason} |"


def _waits(revision: Revision) -> str:
    shown = " ".join(one["reason"] for one in revision.plan["reasons"] if one["field"] == "inventory")
    return ", pods wait" if "pods wait" in shown else ""


ROWS: list[Row] = [
    Row("known", "free", "", "`4×A100-80GB TP4", (gpu_node("gpu-1", A100, 8),), said="parallelism.tensor"),
    Row("known", "held by others", "", ", pods wait", (gpu_node("gpu-1", A100, 8),), (gpu_pod("p", "gpu-1", 7),)),
    Row("known", "cordoned", "", ", pods wait", (gpu_node("gpu-1", A100, 8, unschedulable=True),)),
    Row("known", "scaled to zero", "", "refused, Infeasible"),
    Row(
        *("known", "scaled to zero", "`accelerator.products: [A100-80GB]`", ", pods wait"),
        spec={"accelerator": {"products": ["A100-80GB"]}},
    ),
    Row(
        *("known", "of another product", "`accelerator.products: [A100-80GB]`", ", pods wait"),
        (gpu_node("gpu-1", "Tesla-T4", 4),),
        spec={"accelerator": {"products": ["A100-80GB"]}},
    ),
    Row("known", "scaled to zero", "`inventory.nodePools` with 8 × A100-80GB", ", pods wait", pools=POOL),
    Row(
        *("known", "scaled to zero", "`parallelism.tensor: 4`", "`4×GPU TP4"),
        spec={"parallelism": {"tensor": 4}},
    ),
    Row("known, small", "scaled to zero", "", "`1×GPU TP1", repository=SMALL, said="parallelism.tensor"),
    Row("known", "unlabelled", "", "refused, Infeasible", (unlabelled("gpu-1"),)),
    Row("known", "tainted", "", "refused, Infeasible", (gpu_node("gpu-1", A100, 8, taints=TAINTS),)),
    Row(
        *("known", "tainted", "a toleration in `podTemplate`", "`4×A100-80GB TP4"),
        (gpu_node("gpu-1", A100, 8, taints=TAINTS),),
        spec=TOLERANT,
        said="parallelism.tensor",
    ),
    Row("known", "of an unknown product", "", "refused, Infeasible", (gpu_node("gpu-1", "NVIDIA-X9", 8),)),
    Row("known", "split by MIG", "", "refused, Infeasible", (split("gpu-1"),)),
    Row("known", "not read (`inventory.mode: Disabled`)", "", "refused, Infeasible", problem=DISABLED),
    Row(
        *("known", "not read (`inventory.mode: Disabled`)", "`inventory.nodePools` with 8 × A100-80GB"),
        "`4×A100-80GB TP4",
        pools=POOL,
        problem=DISABLED,
    ),
    Row("unknown", "free", "", "`1×GPU TP1", (gpu_node("gpu-1", A100, 8),), repository=NOT_KNOWN, said="model.source"),
    Row("unknown", "scaled to zero", "", "`1×GPU TP1", repository=NOT_KNOWN),
    Row("unknown", "unlabelled", "", "`1×GPU TP1", (unlabelled("gpu-1"),), repository=NOT_KNOWN),
    Row(
        *("unknown", "any", "`parallelism.tensor: 4`", "`4×GPU TP4"),
        repository=NOT_KNOWN,
        spec={"parallelism": {"tensor": 4}},
        said="parallelism.tensor",
    ),
    Row(
        *("unknown", "free", "`budget`, `objectives` or a load", "refused, UnsupportedByRuntime"),
        (gpu_node("gpu-1", A100, 8),),
        repository=NOT_KNOWN,
        spec={"budget": {"maxMonthlyUSD": 9000}},
    ),
]


def test_the_table_of_unknowns_has_a_line_for_each_row_and_no_other() -> None:
    before, head, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    _, blank, rest = after.partition("\n\n")
    text = before + head + "".join(row.line() + "\n" for row in ROWS) + "\n" + rest
    assert head
    assert blank
    if os.environ.get("MILLSTREAM_WRITE_GOLDEN"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "write the rows anew with MILLSTREAM_WRITE_GOLDEN=1, and read them"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.shape}, {row.gpus}, {row.given or 'nothing more'}")
def test_each_row_of_the_table_of_unknowns_is_what_happens(row: Row) -> None:
    outcome, reason = row.run()
    assert row.outcome in outcome
    assert reason.endswith((".", "}}'")), "a sentence, or the command that applies the first edit"
    assert "\n" not in reason
    assert len(reason) <= 1024


@pytest.mark.parametrize(
    ("gpus", "remedy"),
    [
        ("scaled to zero", "accelerator.products"),
        ("unlabelled", "kubectl label node gpu-1 nvidia.com/gpu.product="),
        ("tainted", "{key: dedicated, operator: Equal, value: search, effect: NoSchedule}"),
        ("of an unknown product", "catalog.gpus"),
    ],
)
def test_a_refusal_says_how_to_make_the_gpus_known(gpus: str, remedy: str) -> None:
    row = next(row for row in ROWS if row.gpus == gpus and row.outcome.startswith("refused"))
    assert remedy in row.run()[1]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"parallelism": {"tensor": 2}}, "2×GPU TP2"),
        ({"accelerator": {"products": ["A100-80GB"]}, "parallelism": {"tensor": 8}}, "8×A100-80GB TP8"),
        ({"accelerator": {"products": ["NVIDIA-X9"]}, "parallelism": {"tensor": 4}}, "4×GPU TP4"),
        ({"accelerator": {"products": ["GH200-96GB"]}, "parallelism": {"tensor": 4}}, "4×GH200-96GB TP4"),
    ],
)
def test_what_the_spec_insists_on_is_planned_without_a_node(spec: Manifest, said: str) -> None:
    assert said in Row("", "", "", "", spec=spec).run()[0]


def test_what_cannot_fit_on_the_named_products_is_refused_before_a_node_comes() -> None:
    outcome, message = Row("", "", "", "", spec={"accelerator": {"products": ["L4"]}}).run()
    assert outcome == "refused, Infeasible"
    assert "of weights leave" in message


def test_pools_count_where_smaller_gpus_are_there() -> None:
    """The pool at zero holds the model, and the nodes that run do not."""
    row = Row("", "", "", "", (gpu_node("small", "Tesla-T4", 4),), pools=POOL)
    assert row.run()[0].startswith("`4×A100-80GB TP4")
    assert "declared node pool" in row.run()[1]


def test_a_pool_whose_nodes_exist_is_not_counted_twice() -> None:
    nodes = tuple(gpu_node(f"gpu-{number}", A100, 8) for number in range(2))
    pods = tuple(gpu_pod(f"p{number}", f"gpu-{number}", 8) for number in range(2))
    facts = ClusterFacts(Index(), node_pools=read_node_pools(POOL))
    facts.problem = None
    facts.replace_nodes(filter(None, map(read_node, nodes)))
    for pod in pods:
        facts.put_pod(pod["metadata"]["name"], read_pod(pod | {"metadata": pod["metadata"] | {"uid": "u"}}))
    found = facts.of(parse(manifest("d", model={"source": {"huggingFace": {"repository": LARGE}}}, accelerator={})))
    assert found.capacity is not None
    assert str(found.capacity) == "2 × 8 A100-80GB"
    assert found.capacity.absent == ()


def test_a_pool_that_pods_do_not_tolerate_is_named() -> None:
    tainted = POOL.replace("}", ', "taints": [{"key": "dedicated", "effect": "NoSchedule"}]}')
    outcome, message = Row("", "", "", "", pools=tainted).run()
    assert outcome == "refused, Infeasible"
    assert "Node pool A100-80GB:8 is left out: the pods do not tolerate the taint dedicated:NoSchedule." in message
    assert Row("", "", "", "", pools=tainted, spec=TOLERANT).run()[0].startswith("`4×A100-80GB TP4")


def test_nodes_that_are_left_out_are_named_in_every_verdict() -> None:
    tainted = gpu_node("other-team", A100, 8, taints=TAINTS)
    feasible = Row("", "", "", "", (gpu_node("mine", A100, 8), tainted), said="nodes")
    left_out = "Node other-team is left out: the pods do not tolerate the taint dedicated=search:NoSchedule."
    assert feasible.run() == (feasible.run()[0], left_out)
    infeasible = Row("", "", "", "", (gpu_node("small", "Tesla-T4", 1), tainted))
    assert left_out in infeasible.run()[1]


def test_many_nodes_with_one_reason_are_one_sentence() -> None:
    nodes = tuple(unlabelled(f"gpu-{number:03}") for number in range(300))
    message = Row("", "", "", "", nodes).run()[1]
    assert message.count("left out") == 1
    assert "Nodes gpu-000, gpu-001, gpu-002 and 297 more are left out" in message
