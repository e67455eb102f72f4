"""What every kind of workload does, and what rollout, claims and status make of it: one pod per replica, and groups.

Each test runs with the product's Deployments and with the groups of two pods of the test kit.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest

from millstream_operator import workloads
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.api.status import AppliedStrategy, RolloutPhase
from millstream_operator.children.deleted_owners import running_for
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.facts.gpu_pods import read_pod
from millstream_operator.facts.gpu_watch import closed_nodes
from millstream_operator.inventory.nodes import read_node
from millstream_operator.kube.index import Index
from millstream_operator.kube.kinds import CONTROLLER_REVISION, LLM_DEPLOYMENT, OWNED
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.probing.answer import Answer
from millstream_operator.rendering.names import LEADER, ROLE_LABEL
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, render_revision
from millstream_operator.rendering.revision_marks import Marks
from millstream_operator.rollout.pruning import digests_in_use
from millstream_operator.rollout.revisions import PinnedRevision, record_of
from millstream_operator.rollout.rollout import RolloutInput, RolloutStep, next_step
from millstream_operator.rollout.workload import rolled_out
from millstream_operator.status.observation import Observation
from millstream_operator.status.pod_progress import pods_scheduled, warmed_up
from millstream_operator.status.status import status_of
from millstream_operator.workloads.workload import Workload
from tests.support.gpu_nodes import A100, gpu_node, spec_on_gpu
from tests.support.llmdeployments import manifest
from tests.support.pod_groups import KITS, WorkloadKit

Manifest = dict[str, Any]
GPUS_PER_POD = 8
METHODS = {"kind", "roles", "render", "read", "to_zero", "templates", "replicas", "needs"}


@pytest.fixture(params=KITS)
def kit(request: pytest.FixtureRequest) -> WorkloadKit:
    return KITS[request.param]


def owner(name: str = "demo", **spec: Any) -> LLMDeployment:
    on_gpu = spec_on_gpu(accelerator={"type": "GPU", "products": ["A100-80GB"]}, parallelism={"tensor": GPUS_PER_POD})
    stored = manifest(name, **(on_gpu | spec))
    stored["metadata"]["uid"] = f"uid-{name}"
    return parse(stored)


def revision(kit: WorkloadKit, one: LLMDeployment, image: str = "good") -> Revision:
    """Of a plan for all GPUs of a replica: eight for each of its pods."""
    plan = plan_from_spec(one, PlanDefaults(f"registry.example.com/runtime:{image}"))
    rendered = render_revision(one, plan, PodDefaults())
    return replace(rendered, plan={**rendered.plan, "accelerator": "A100-80GB", "gpusPerReplica": 8 * kit.size})


def nodes_of(kit: WorkloadKit, replica: str) -> list[str]:
    return [f"{replica}-node-{number}" for number in range(kit.size)]


class Cluster:
    """The GPUs of a cluster, as the operator counts them."""

    def __init__(self, kit: WorkloadKit, *nodes: Manifest) -> None:
        self.kit, self.index = kit, Index(on_change=lambda kind, found: self.facts.changed(kind, found))
        self.facts = ClusterFacts(self.index, workloads=kit.workloads)
        self.facts.problem = None
        self.facts.replace_nodes(filter(None, map(read_node, nodes)), closed_nodes(nodes))

    def stores(self, one: LLMDeployment, pin: PinnedRevision) -> None:
        """Its record is written and seen."""
        stored = one.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.index.put(LLM_DEPLOYMENT, stored | {"metadata": {**stored["metadata"], "resourceVersion": "2"}})
        record = record_of(one, pin)
        record["metadata"] |= {"uid": f"record-{one.name}", "resourceVersion": "2"}
        self.index.put(CONTROLLER_REVISION, record)

    def run(self, *pods: Manifest) -> None:
        for pod in pods:
            self.facts.put_pod(pod["metadata"]["uid"], read_pod(pod, self.kit.workloads))

    def free_for(self, one: LLMDeployment) -> int:
        """GPUs that a new plan of this LLMDeployment may use."""
        inventory = self.facts.of(one).inventory
        return sum(kind.gpus * kind.nodes for kind in inventory.kinds) if inventory is not None else 0


# The kinds


def kinds_of_the_product() -> set[type]:
    """Classes of `workloads/` that implement the contract."""
    found: set[type] = set()
    for module in pkgutil.iter_modules(workloads.__path__):
        members = vars(importlib.import_module(f"{workloads.__name__}.{module.name}")).values()
        found |= {
            one for one in members if isinstance(one, type) and one is not Workload and vars(one).keys() >= METHODS
        }
    return found


def test_every_kind_of_workload_runs_the_contract() -> None:
    with_a_kit = {type(kit.workloads) for kit in KITS.values()}
    assert kinds_of_the_product() <= with_a_kit, "add a WorkloadKit to tests/support/pod_groups.py"
    assert len(with_a_kit - kinds_of_the_product()) == 1, "the groups of the test kit"


def test_every_kind_of_workload_is_watched_and_deleted_with_its_owner() -> None:
    assert {kind().kind for kind in kinds_of_the_product()} <= set(OWNED)


# The object


def test_the_object_is_rendered_with_the_replicas_and_the_revision(kit: WorkloadKit) -> None:
    one = owner(replicas=3)
    template = revision(kit, one).template
    surge, in_place = (kit.workloads.render(one, template, strategy) for strategy in AppliedStrategy)
    assert surge != in_place, "the strategy reaches the object"
    for rendered in (surge, in_place):
        rendered["metadata"]["generation"] = 1
        state = kit.workloads.read(rendered)
        assert (state.wanted, state.digest) == (3, revision(kit, one).digest)
        assert not state.is_observed
        assert list(kit.workloads.templates(rendered)) == [template]
        assert rendered["kind"] == kit.workloads.kind.kind


def test_the_object_of_a_deleted_owner_is_scaled_to_zero(kit: WorkloadKit) -> None:
    live = kit.live(owner(replicas=3), revision(kit, owner()).template, 3)
    assert running_for(kit.workloads, live) == owner().metadata.uid
    live["spec"] |= kit.workloads.to_zero()["spec"]
    assert kit.workloads.read(live).wanted == 0
    assert running_for(kit.workloads, live) is None


def test_a_rollout_that_is_held_says_at_how_many_and_another_is_rendered_as_before(kit: WorkloadKit) -> None:
    one = owner(replicas=3)
    template, surge = revision(kit, one).template, AppliedStrategy.AVAILABILITY
    for held in (None, 1, 3):
        rendered = kit.workloads.render(one, template, surge, held)
        rendered["metadata"]["generation"] = 1
        assert kit.workloads.read(rendered).held == held
    assert kit.workloads.render(one, template, surge, None) == kit.workloads.render(one, template, surge)


def test_a_revision_is_rolled_out_when_every_replica_of_it_is_available(kit: WorkloadKit) -> None:
    one = owner(replicas=2)
    new = revision(kit, one)
    for available, expected in ((1, False), (2, True)):
        state = kit.workloads.read(kit.live(one, new.template, available, updated=2))
        assert rolled_out(one, new, state) is expected
    of_another = kit.workloads.read(kit.live(one, revision(kit, one, "other").template, 2))
    assert not rolled_out(one, new, of_another)
    assert digests_in_use(of_another, kit.replica("a", new.template)) == {new.digest, of_another.digest}


# Replicas


def test_pods_are_grouped_into_replicas_that_serve_as_a_whole(kit: WorkloadKit) -> None:
    new = revision(kit, owner())
    pods = kit.replica("a", new.template, *nodes_of(kit, "a")) + kit.replica("b", new.template, *nodes_of(kit, "b"))
    found = kit.workloads.replicas(pods)
    assert {one.uid for one in found} == {"uid-a-0", "uid-b-0"}, "named after their leaders"
    assert all(one.is_ready and one.is_scheduled and one.digest == new.digest for one in found)
    assert {node for _, node in found[0].nodes} == set(nodes_of(kit, found[0].name[0]))
    pods[0]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert [one.is_ready for one in kit.workloads.replicas(pods)].count(True) == 1


def test_half_a_group_does_not_serve() -> None:
    kit = KITS["groups of two pods"]
    worker, leader = kit.replica("a", revision(kit, owner()).template, "n1", "n2")
    for half in ([leader], [worker]):
        (found,) = kit.workloads.replicas(half)
        assert not found.is_ready
        assert not found.is_scheduled
        assert found.is_on_a_node


def test_a_pod_that_has_ended_is_of_no_replica(kit: WorkloadKit) -> None:
    """It was evicted, and its object stays."""
    pods = kit.replica("a", revision(kit, owner()).template, *nodes_of(kit, "a"))
    for pod in pods:
        pod["status"]["phase"] = "Failed"
    assert kit.workloads.replicas(pods) == []


# Claims


def test_a_replica_is_claimed_on_all_its_nodes(kit: WorkloadKit) -> None:
    one, other = owner(), owner("other")
    cluster = Cluster(kit, *(gpu_node(name, A100, GPUS_PER_POD) for name in [*nodes_of(kit, "a"), "spare"]))
    assert cluster.free_for(other) == GPUS_PER_POD * (kit.size + 1)
    cluster.stores(one, PinnedRevision(revision(kit, one), 1))
    assert cluster.free_for(other) == GPUS_PER_POD, "promised before any pod is bound"
    pods = kit.replica("a", revision(kit, one).template, *nodes_of(kit, "a"))
    for bound in range(1, kit.size + 1):
        cluster.run(*pods[:bound])
        assert cluster.free_for(other) == GPUS_PER_POD, "what is bound is held, and the rest still promised"
    assert cluster.free_for(one) == GPUS_PER_POD * (kit.size + 1), "its own next plan takes their place"


def test_half_a_group_is_no_free_capacity() -> None:
    kit = KITS["groups of two pods"]
    one, other = owner(), owner("other")
    cluster = Cluster(kit, gpu_node("n1", A100, 8), gpu_node("n2", A100, 8))
    cluster.stores(one, PinnedRevision(revision(kit, one), 1))
    for half in kit.replica("a", revision(kit, one).template, "n1", "n2"):
        cluster.run(half)
        assert cluster.free_for(other) == 0
        cluster.facts.put_pod(half["metadata"]["uid"], None)


def test_pods_of_another_role_are_of_no_replica(kit: WorkloadKit) -> None:
    one = owner()
    cluster = Cluster(kit, *(gpu_node(name, A100, GPUS_PER_POD) for name in nodes_of(kit, "a")))
    cluster.stores(one, PinnedRevision(revision(kit, one), 1))
    job, *_ = kit.replica("job", revision(kit, one).template, *nodes_of(kit, "a"))
    job["metadata"]["labels"][ROLE_LABEL] = "quantizer"
    cluster.run(job)
    assert not cluster.facts.holds_gpus(one)
    assert cluster.free_for(one) == GPUS_PER_POD * (kit.size - 1), "the Job keeps its GPUs under the owner's next plan"


# Rollouts


def step(kit: WorkloadKit, one: LLMDeployment, pods: list[Manifest], *nodes: Manifest, begun: bool) -> RolloutStep:
    """The next step from revision `good`, which answered, to `better`."""
    good, better = revision(kit, one, "good"), revision(kit, one, "better")
    pin, before = PinnedRevision(better, 2), PinnedRevision(good, 1, Marks(answered=True))
    cluster = Cluster(kit, *nodes)
    cluster.stores(one, pin)
    cluster.run(*pods)
    live = kit.live(one, better.template, 0, updated=1) if begun else kit.live(one, good.template, 1)
    inputs = RolloutInput(
        one,
        pin,
        [record_of(one, pin), record_of(one, before)],
        live,
        pods,
        look_for_room=lambda *asked: cluster.facts.room(one, *asked),
        now="2025-01-01T01:00:00Z",
        workloads=kit.workloads,
    )
    return next_step(inputs)


def test_a_group_is_surged_where_there_are_gpus_for_all_its_pods(kit: WorkloadKit) -> None:
    one = owner()
    pods = kit.replica("a", revision(kit, one).template, *nodes_of(kit, "a"))
    own = [gpu_node(name, A100, GPUS_PER_POD) for name in nodes_of(kit, "a")]
    spare = [gpu_node(f"spare-{number}", A100, GPUS_PER_POD) for number in range(kit.size)]
    assert step(kit, one, pods, *own, *spare, begun=False).strategy is AppliedStrategy.AVAILABILITY
    assert step(kit, one, pods, *own, *spare, begun=False).blocked is None
    short = step(kit, one, pods, *own, *spare[1:], begun=False)
    assert short.blocked is not None, "one node too few: the only replica that serves is not given up at once"
    assert short.blocked.reason is Reason.WAITING_FOR_NODE


def test_a_group_is_replaced_in_place_where_giving_it_up_makes_room_for_all_its_pods(kit: WorkloadKit) -> None:
    one = owner(rollout={"strategy": "ResourceAware"})
    pods = kit.replica("a", revision(kit, one).template, *nodes_of(kit, "a"))
    own = [gpu_node(name, A100, GPUS_PER_POD) for name in nodes_of(kit, "a")]
    found = step(kit, one, pods, *own, begun=False)
    assert (found.strategy, found.phase, found.blocked) == (
        AppliedStrategy.RESOURCE_AWARE,
        RolloutPhase.PROGRESSING,
        None,
    )
    own[-1]["spec"]["unschedulable"] = True
    blocked = step(kit, one, pods, *own, begun=False).blocked
    assert blocked is not None
    assert blocked.reason is Reason.NO_ROOM
    assert f"pod a-0: node {nodes_of(kit, 'a')[-1]} takes no pods now (cordoned)" in blocked.message


def test_a_failure_of_any_pod_is_a_failure_of_its_revision(kit: WorkloadKit) -> None:
    one = owner(rollout={"strategy": "ResourceAware"})
    crashed = {"terminated": {"exitCode": 1, "message": '{"reason": "CheckpointInvalid", "message": "It is so."}'}}
    pods = kit.replica("b", revision(kit, one, "better").template, *nodes_of(kit, "b"), ready=False)
    pods[0]["status"]["containerStatuses"] = [{"name": "runtime", "restartCount": 0, "lastState": crashed}]
    found = step(kit, one, pods, *(gpu_node(name, A100, GPUS_PER_POD) for name in nodes_of(kit, "b")), begun=True)
    assert found.phase is RolloutPhase.ROLLED_BACK
    assert found.failure is not None
    assert found.failure.reason == "CheckpointInvalid"


# Status


def observed(kit: WorkloadKit, one: LLMDeployment, available: int, pods: list[Manifest]) -> Observation:
    new = revision(kit, one)
    live = kit.live(one, new.template, available, updated=one.spec.replicas)
    return Observation(one, new, live, pods, Answer(), workloads=kit.workloads)


def test_the_status_counts_replicas(kit: WorkloadKit) -> None:
    one = owner(replicas=2)
    template = revision(kit, one).template
    pods = kit.replica("a", template, *nodes_of(kit, "a")) + kit.replica("b", template, *nodes_of(kit, "b"))
    status = status_of(observed(kit, one, 2, pods), "2025-01-01T00:00:00Z")
    assert [status[name] for name in ("replicas", "updatedReplicas", "availableReplicas")] == [2, 2, 2]
    assert status["rollout"]["availableReplicas"] == 2
    assert status["conditions"][0]["status"] == "True"
    leader = next(pod for pod in pods if pod["metadata"]["labels"][ROLE_LABEL] == LEADER)
    leader["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert observed(kit, one, 1, pods).updated_and_available == 1


def test_a_group_of_which_one_pod_waits_for_a_node_is_not_ready() -> None:
    kit = KITS["groups of two pods"]
    one = owner()
    pods = kit.replica("a", revision(kit, one).template, "n1")
    seen = observed(kit, one, 0, pods)
    assert seen.updated_and_available == 0
    assert warmed_up(seen, None, None).message == "0 of 1 replicas are warm."
    scheduled = pods_scheduled(seen, Diagnosis(Reason.STARTING, "It starts."))
    assert scheduled.message == "1 of 2 pods have a node."
    assert status_of(seen, "2025-01-01T00:00:00Z")["conditions"][0]["status"] == "False"
