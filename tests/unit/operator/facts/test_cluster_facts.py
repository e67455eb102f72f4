"""What plans are made from in the cluster: what is free, what others are promised, and why something is not known."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.facts.cluster_facts import ClusterFacts, shape_from_catalogue
from millstream_operator.facts.gpu_pods import read_pod
from millstream_operator.inventory.nodes import read_node
from millstream_operator.kube.index import Index
from millstream_operator.kube.kinds import CONTROLLER_REVISION, LLM_DEPLOYMENT
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import controller_revision
from millstream_operator.rollout.pinning import Pinning
from tests.support.gpu_nodes import A100, L4, MODEL, T4, gpu_node, gpu_pod, spec_on_gpu
from tests.support.llmdeployments import manifest
from tests.support.pinned_plans import chosen_pin

Manifest = dict[str, Any]
HUB = {"huggingFace": {"repository": MODEL}}


class Cluster:
    """An index, its cluster_facts, and plans made from them: what the reconciler does, without its writes."""

    def __init__(self, *nodes: Manifest) -> None:
        self.index = Index(on_change=lambda kind, found: self.cluster_facts.changed(kind, found))
        self.cluster_facts = ClusterFacts(self.index)
        self.cluster_facts.problem = None
        self.cluster_facts.replace_nodes(filter(None, map(read_node, nodes)))
        self.pinning = Pinning(self.cluster_facts, PlanDefaults("registry.example.com/runtime:1"), PodDefaults())
        self._version = 1

    def promised_gpus(self) -> int:
        """GPUs that the plans of all LLMDeployments want and that are not bound yet."""
        self.cluster_facts._update_promises()
        return sum(want.gpus * times for want, times in self.cluster_facts._accounts._wanted.items())

    def store(self, name: str, **spec: Any) -> Manifest:
        stored = manifest(name, **spec_on_gpu(**spec))
        self._version += 1
        stored["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": str(self._version)}
        self.index.put(LLM_DEPLOYMENT, stored)
        return stored

    def plan(self, name: str, *, record: bool = True, **spec: Any) -> Manifest:
        """status.plan of a new LLMDeployment; `record`: its record is written and seen."""
        owner = parse(self.store(name, **spec))
        pin = chosen_pin(self.pinning, owner, [])
        if record:
            self._version += 1
            written = controller_revision(owner, pin.revision, pin.number)
            written["metadata"] |= {"uid": f"record-{name}", "resourceVersion": str(self._version)}
            self.index.put(CONTROLLER_REVISION, written)
        return pin.revision.plan

    def restarted(self) -> Cluster:
        """Another process: it knows what a listing tells, and nothing else."""
        other = Cluster()
        other._version = self._version
        for kind in (LLM_DEPLOYMENT, CONTROLLER_REVISION):
            other.index.replace(kind, self.index.all(kind), str(self._version))
        return other


def waits(plan: Manifest) -> bool:
    return any(reason["field"] == "inventory" for reason in plan["reasons"])


# Promises


def test_a_thousand_deployments_that_see_the_same_gpus_do_not_all_plan_on_them() -> None:
    """Of every second one the record is not seen yet: its promise counts all the same."""
    nodes = [gpu_node(f"t{number}", T4, 4) for number in range(50)]
    nodes += [gpu_node(f"l{number}", L4, 6) for number in range(50)]
    cluster = Cluster(*nodes)
    plans = [cluster.plan(f"d{number}", record=number % 2 == 0) for number in range(1000)]
    planned = [plan["accelerator"] for plan in plans if not waits(plan)]
    assert (planned.count("T4-16GB"), planned.count("L4-24GB")) == (200, 300)
    assert {plan["accelerator"] for plan in plans if waits(plan)} == {"T4-16GB"}, "all wait for the cheapest"
    assert all(plan["preferred"] == "1×T4-16GB TP1 BF16" for plan in plans[200:500])


def test_a_restarted_operator_knows_what_was_promised() -> None:
    nodes = [gpu_node("a", T4, 2), gpu_node("b", L4, 1)]
    before = Cluster(*nodes)
    assert [before.plan(f"d{number}")["accelerator"] for number in range(2)] == ["T4-16GB"] * 2
    after = before.restarted()
    after.cluster_facts.replace_nodes(filter(None, map(read_node, nodes)))
    assert after.promised_gpus() == 2
    assert after.plan("d2")["accelerator"] == "L4-24GB"


def test_replicas_are_promised_each() -> None:
    cluster = Cluster(gpu_node("a", T4, 4), gpu_node("b", L4, 1))
    cluster.plan("three", replicas=3)
    assert cluster.plan("one")["accelerator"] == "T4-16GB"
    assert cluster.plan("another")["accelerator"] == "L4-24GB"


def test_a_promise_ends_as_pods_are_bound_and_counts_no_gpu_twice() -> None:
    cluster = Cluster(gpu_node("a", T4, 2), gpu_node("b", L4, 1))
    cluster.plan("d", replicas=2)
    assert cluster.promised_gpus() == 2
    (record,) = cluster.index.all(CONTROLLER_REVISION)
    labels = record["metadata"]["labels"]
    pod = gpu_pod("p", "a")
    pod["metadata"] |= {"uid": "p", "labels": labels}
    cluster.cluster_facts.put_pod("p", read_pod(pod))
    assert cluster.promised_gpus() == 1
    assert cluster.plan("other")["accelerator"] == "L4-24GB", "one is held and one is promised"
    cluster.cluster_facts.put_pod("p", None)
    assert cluster.promised_gpus() == 3, "its pod is gone and will come back"


def test_the_gpus_of_a_job_of_ours_are_free_for_no_plan() -> None:
    """A pod that quantizes or checks a model keeps its GPUs when the plan changes, and is no replica."""
    cluster = Cluster(gpu_node("a", T4, 2), gpu_node("b", L4, 2))
    cluster.plan("d", replicas=2)
    (record,) = cluster.index.all(CONTROLLER_REVISION)
    pod = gpu_pod("quantize", "a", gpus=2)
    pod["metadata"] |= {"uid": "q", "labels": {**record["metadata"]["labels"], "millstream.dev/role": "quantize"}}
    cluster.cluster_facts.put_pod("q", read_pod(pod))
    assert cluster.promised_gpus() == 2, "both replicas are still to come"
    owner = parse(cluster.store("d", replicas=2))
    assert not cluster.cluster_facts.holds_gpus(owner)
    assert str(cluster.cluster_facts.of(owner).inventory) == "1 × 2 L4-24GB"


@pytest.mark.parametrize("how", ["deleted", "scaled to zero"])
def test_a_promise_ends_with_its_deployment(how: str) -> None:
    cluster = Cluster(gpu_node("a", T4, 1), gpu_node("b", L4, 1))
    cluster.plan("d")
    if how == "deleted":
        stored = cluster.index.get(LLM_DEPLOYMENT, "team", "d")
        assert stored is not None
        cluster.index.remove(LLM_DEPLOYMENT, stored)
    else:
        cluster.store("d", replicas=0)
    assert cluster.promised_gpus() == 0
    assert cluster.plan("next")["accelerator"] == "T4-16GB"


def test_a_plan_whose_record_is_not_seen_yet_is_not_made_anew() -> None:
    """The answer to the write was lost, and meanwhile something better is free."""
    cluster = Cluster(gpu_node("a", L4, 1))
    first = cluster.plan("d", record=False)
    cluster.cluster_facts.put_node("b", read_node(gpu_node("b", T4, 1)))
    owner = parse(cluster.store("d"))
    assert chosen_pin(cluster.pinning, owner, []).revision.plan == first


def test_pods_of_others_are_not_free() -> None:
    cluster = Cluster(gpu_node("a", T4, 1), gpu_node("b", L4, 1))
    pod = gpu_pod("theirs", "a")
    pod["metadata"]["uid"] = "theirs"
    cluster.cluster_facts.put_pod("theirs", read_pod(pod))
    assert cluster.plan("d")["accelerator"] == "L4-24GB"


def test_a_gpu_is_spare_where_one_more_pod_would_find_its_gpus() -> None:
    """What `rollout.strategy: Auto` asks before it makes a pod more."""
    cluster = Cluster(gpu_node("a", T4, 1))
    cluster.plan("d")
    owner = parse(cluster.store("d"))
    (record,) = cluster.index.all(CONTROLLER_REVISION)
    revision = chosen_pin(cluster.pinning, owner, [record]).revision
    assert cluster.cluster_facts.room(owner, revision, ()).now is True, "nothing runs yet"
    pod = gpu_pod("p", "a")
    pod["metadata"] |= {"uid": "p", "labels": record["metadata"]["labels"]}
    cluster.cluster_facts.put_pod("p", read_pod(pod))
    assert cluster.cluster_facts.room(owner, revision, ()).now is False, "the only one is its own"
    cluster.cluster_facts.put_node("b", read_node(gpu_node("b", L4, 8)))
    assert cluster.cluster_facts.room(owner, revision, ()).now is False, "its pods would not go there"
    cluster.cluster_facts.put_node("c", read_node(gpu_node("c", T4, 1)))
    assert cluster.cluster_facts.room(owner, revision, ()).now is True
    cluster.cluster_facts.problem = "unknown"
    assert cluster.cluster_facts.room(owner, revision, ()).now is None


# What is not known


def test_without_gpu_nodes_or_rights_the_plan_is_made_from_the_spec_and_says_why() -> None:
    cluster = Cluster()
    plan = cluster.plan("d")
    assert (plan["summary"], plan["accelerator"]) == ("1×GPU TP1 BF16", "GPU")
    assert "No node offers nvidia.com/gpu" in reasons(plan, "inventory")[0]
    assert reasons(plan, "parallelism.tensor") == ["The model fits on one GPU of any product of the catalogue."]
    cluster.cluster_facts.problem = "The operator has no right to read the cluster's nodes and pods: forbidden"
    assert cluster.cluster_facts.problem in reasons(cluster.plan("e"), "inventory")


def test_gpus_that_cannot_be_planned_on_are_no_reason_to_refuse() -> None:
    unlabelled = gpu_node("a")
    unlabelled["metadata"]["labels"] = {}
    (why,) = reasons(Cluster(unlabelled).plan("d"), "inventory")
    assert "Node a is left out" in why
    assert "GPU feature discovery" in why


def test_nodes_that_the_pods_may_not_go_to_are_no_inventory() -> None:
    taints = [{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]
    cluster = Cluster(gpu_node("a", taints=taints))
    assert "tolerate the taint dedicated=x:NoSchedule" in reasons(cluster.plan("d"), "inventory")[0]
    tolerant: Manifest = {"podTemplate": {"spec": {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}}}
    assert cluster.plan("e", **tolerant)["accelerator"] == "L4-24GB"


def test_nodes_that_the_required_affinity_leaves_out_are_no_inventory() -> None:
    """Neither free GPUs nor declared pools count there, and the reason names what was asked."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"

    def affinity(*terms: list[Manifest]) -> Manifest:
        selector = {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}
        return {"podTemplate": {"spec": {"affinity": {"nodeAffinity": {required: selector}}}}}

    zone_b: Manifest = {"key": "zone", "operator": "In", "values": ["b"]}
    fast: Manifest = {"key": "disk", "operator": "Exists"}
    cluster = Cluster(
        gpu_node("a", T4, labels={"zone": "a"}),
        gpu_node("b", L4, labels={"zone": "b"}),
        gpu_node("c", A100, labels={"zone": "c", "disk": "ssd"}),
    )
    assert cluster.plan("anywhere", record=False)["accelerator"] == "T4-16GB"
    assert cluster.plan("d", record=False, **affinity([zone_b]))["accelerator"] == "L4-24GB"
    assert cluster.plan("e", record=False, **affinity([zone_b, fast], [fast]))["accelerator"] == "A100-80GB"
    (why,) = reasons(cluster.plan("f", record=False, **affinity([zone_b, fast])), "inventory")[:1]
    assert "are left out" in why
    assert "required node affinity" in why
    assert "disk Exists and zone In (b)" in why


def test_a_model_that_was_not_inspected_is_planned_from_the_spec() -> None:
    plan = Cluster(gpu_node("a")).plan("d", model={"source": {"local": {"path": "demo-chat"}}})
    assert plan["summary"] == "1×GPU TP1"
    assert "config.json" in reasons(plan, "model.source")[0]
    assert reasons(plan, "inventory") == []


def test_a_cpu_needs_no_gpus() -> None:
    plan = Cluster().plan("d", accelerator={"type": "CPU"}, model={"source": {"local": {"path": "demo-chat"}}})
    assert reasons(plan, "inventory") == reasons(plan, "model.source") == []


def reasons(plan: Manifest, field: str) -> list[str]:
    return [reason["reason"] for reason in plan["reasons"] if reason["field"] == field]


@pytest.mark.parametrize(
    ("spec", "known"),
    [
        ({"model": {"source": HUB}}, True),
        ({"model": {"source": {"huggingFace": {"repository": MODEL, "revision": "main"}}}}, True),
        ({"model": {"source": {"huggingFace": {"repository": MODEL, "revision": "gptq-4bit"}}}}, False),
        ({"model": {"source": {"huggingFace": {"repository": "somebody/else"}}}}, False),
        ({"model": {"source": HUB, "configMapRef": {"name": "shape", "key": "config.json"}}}, False),
        ({"model": {"source": {"local": {"path": "m"}}}}, False),
        (
            {
                "model": {"source": HUB},
                "podTemplate": {
                    "spec": {
                        "containers": [{"name": "runtime", "env": [{"name": "HF_ENDPOINT", "value": "http://mirror"}]}]
                    }
                },
            },
            False,
        ),
    ],
)
def test_the_table_of_known_models_is_used_only_where_it_is_certain(spec: Manifest, known: bool) -> None:
    owner = parse(manifest(**spec))
    assert shape_from_catalogue(owner, owner.spec.model.source) == (known_shape(MODEL) if known else None)


# What changes, and what does not


def test_the_hash_of_the_facts_follows_gpus_and_prices_and_not_what_is_free() -> None:
    def hashed(cluster: Cluster) -> str:
        found: str = cluster.plan("d", record=False)["factsHash"]
        cluster.pinning.forget("uid-d")
        return found

    cluster = Cluster(gpu_node("a", T4, 2))
    first = hashed(cluster)
    pod = gpu_pod("theirs", "a")
    pod["metadata"]["uid"] = "theirs"
    cluster.cluster_facts.put_pod("theirs", read_pod(pod))
    assert hashed(cluster) == first
    cluster.cluster_facts.use_catalog(load_catalog({"T4-16GB": {"listPriceUSDPerHour": 0.1}}))
    assert (second := hashed(cluster)) != first
    cluster.cluster_facts.put_node("b", read_node(gpu_node("b", A100, 8)))
    assert hashed(cluster) not in (first, second)


def test_plans_are_looked_at_again_when_there_are_other_gpus_or_prices() -> None:
    cluster = Cluster(gpu_node("a", T4, 2))
    assert cluster.cluster_facts.advance()
    pod = gpu_pod("theirs", "a")
    pod["metadata"]["uid"] = "theirs"
    cluster.cluster_facts.put_pod("theirs", read_pod(pod))
    cluster.cluster_facts.put_node("a", read_node(gpu_node("a", T4, 2, unschedulable=True)))
    assert not cluster.cluster_facts.advance(), "pods come and go, and nodes are drained: no news"
    cluster.cluster_facts.put_node("a", None)
    assert cluster.cluster_facts.advance()
