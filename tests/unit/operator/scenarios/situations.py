"""The situations of docs/what-happens-when.md, each run in a simulated cluster until nothing moves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from millstream_operator.inventory.node_pools import read_node_pools
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, LLM_DEPLOYMENT, POD, SERVICE
from millstream_operator.reconciling.probe import LONGEST_REPROBE_SECONDS
from millstream_operator.rendering.kueue import QUEUE_LABEL
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.fake_operator import served as served_model
from tests.support.gpu_nodes import A100, A100_40, L4, T4, gpu_node, gpu_pod, spec_on_gpu
from tests.support.kueue import QueuedScheduler
from tests.support.llmdeployments import manifest
from tests.support.rollout_controller import ended
from tests.support.rollout_world import image, on_nodes, served, served_on_nodes
from tests.unit.operator.reconciling.test_orphans import apply_again, orphaned

Manifest = dict[str, Any]
Status = Manifest
LARGE: Manifest = {"model": {"source": {"huggingFace": {"repository": "meta-llama/Meta-Llama-3-70B-Instruct"}}}}
PEER: Manifest = {"ipBlock": {"cidr": "10.1.0.0/16"}}
POLICY_DENIED = (
    'admission webhook "policy.example.com" denied the request: spec.ingress[0].from[0]: ipBlock is not allowed'
)
SITUATIONS: dict[str, Callable[[], Awaitable[Status]]] = {}
REGISTRY_AWAY = {
    "containerStatuses": [
        {
            "name": "runtime",
            "restartCount": 0,
            "state": {
                "waiting": {
                    "reason": "ImagePullBackOff",
                    "message": 'Back-off pulling image "next": ErrImagePull: dial tcp: lookup registry: no such host',
                }
            },
        }
    ]
}


def situation(run: Callable[[], Awaitable[Status]]) -> Callable[[], Awaitable[Status]]:
    """Name it as the page does."""
    SITUATIONS[run.__name__.replace("_", "-")] = run
    return run


async def in_a_cluster(*objects: Manifest, pools: str = "", **spec: Any) -> FakeOperator:
    cluster = world(manifest(**spec_on_gpu(**spec)))
    for one in objects:
        cluster.put(one)
    operator = FakeOperator(cluster, node_pools=read_node_pools(pools))
    await operator.settle(roll_out=False)
    return operator


# Rollouts


@situation
async def the_new_gpu_is_held_by_another_tenant() -> Status:
    one = await served_on_nodes(
        gpu_node("small", A100_40),
        gpu_node("large", A100),
        gpu_pod("theirs", "large"),
        accelerator={"type": "GPU", "products": ["A100-40GB"]},
    )
    await one.apply(accelerator={"type": "GPU", "products": ["A100-80GB"]})
    return one.status


@situation
async def the_node_is_cordoned_and_the_spec_changes() -> Status:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "ResourceAware"})
    one.cordon("a")
    await one.apply(rollout={"strategy": "ResourceAware", "drainTimeout": "5m"})
    return one.status


@situation
async def one_gpu_one_replica_and_a_new_image() -> Status:
    one = await served_on_nodes(gpu_node("a"))
    one.scheduler.now = lambda: one.operator.now
    await one.apply(**image("better"))
    return one.status


@situation
async def a_waiting_plan_and_a_gpu_becomes_free() -> Status:
    one = on_nodes(gpu_node("a", T4), gpu_node("b", A100), gpu_pod("p", "a"), gpu_pod("q", "b"))
    await one.settle()
    one.cluster.remove(POD, "q")
    await one.settle()
    return one.status


@situation
async def the_registry_is_away_during_a_rollout_in_place() -> Status:
    one = await served("ResourceAware")
    one.controller.failing["next"] = REGISTRY_AWAY
    await one.apply(**image("next"))
    one.controller.let_the_deadline_pass()
    await one.settle()
    return one.status


@situation
async def the_new_revision_crashes_in_a_rollout_in_place() -> Status:
    one = await served("ResourceAware")
    one.controller.failing["next"] = ended("Segmentation fault", restarts=3, code=139)
    await one.apply(**image("next"))
    return one.status


@situation
async def the_only_pod_in_a_queue_without_quota_for_another() -> Status:
    one = on_nodes(gpu_node("a", gpus=2))
    one.controller.scheduler = QueuedScheduler(one.cluster, quota=1)
    one.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].update(labels={QUEUE_LABEL: "team-a"}))
    await one.settle()
    await one.apply(**image("better"))
    return one.status


@situation
async def a_network_policy_that_the_cluster_refuses() -> Status:
    operator = await served_model(manifest(runtime={"image": "good"}))
    operator.cluster.refusing["NetworkPolicy"] = ApiError(403, "Forbidden", POLICY_DENIED)
    respec(operator.cluster, replicas=2, runtime={"image": "better"}, network={"ingress": [PEER]})
    for _ in range(4):
        await operator.turn()
        operator.cluster.roll_out()
    return operator.status()


# Replicas


@situation
async def kubectl_scale_from_one_to_two() -> Status:
    one = await served("Availability")
    respec(one.cluster, replicas=2)
    await one.operator.turn()
    return one.status


@situation
async def kubectl_scale_beyond_the_budget() -> Status:
    operator = await in_a_cluster(gpu_node("a", L4, 8), gpu_node("b", L4, 8), budget={"maxMonthlyUSD": 1200})
    await operator.settle()
    respec(operator.cluster, replicas=10)
    await operator.settle()
    return operator.status()


@situation
async def kubectl_scale_of_the_deployment_beyond_the_budget() -> Status:
    operator = await in_a_cluster(gpu_node("a", L4, 8), budget={"maxMonthlyUSD": 1200}, replicas=2)
    await operator.settle()
    operator.cluster.edit(DEPLOYMENT, "demo", lambda live: live["spec"].update(replicas=5))
    await operator.settle()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["replicas"] == 2
    return operator.status()


@situation
async def the_deployment_is_deleted_and_the_budget_pays_for_no_replica() -> Status:
    operator = await in_a_cluster(gpu_node("a", L4, 8))
    await operator.settle()
    respec(operator.cluster, budget={"maxMonthlyUSD": 100})
    await operator.settle()
    operator.cluster.remove(DEPLOYMENT, "demo")
    await operator.settle()
    return operator.status()


@situation
async def a_load_that_needs_more_replicas() -> Status:
    operator = await in_a_cluster(
        gpu_node("a", L4, 8), gpu_node("b", L4, 8), workload={"profile": "Chat", "requestsPerMinute": 3000}
    )
    await operator.settle()
    return operator.status()


# GPUs that are not known


@situation
async def gpu_nodes_are_scaled_to_zero() -> Status:
    return (await in_a_cluster(**LARGE)).status()


@situation
async def gpu_nodes_are_scaled_to_zero_and_declared_as_a_pool() -> Status:
    pools = '[{"product": "A100-80GB", "gpusPerNode": 8, "maxNodes": 2}]'
    return (await in_a_cluster(pools=pools, **LARGE)).status()


@situation
async def gpu_nodes_without_labels() -> Status:
    node = gpu_node("gpu-1", A100, 8)
    node["metadata"]["labels"] = {}
    return (await in_a_cluster(node, **LARGE)).status()


@situation
async def gpu_nodes_with_a_taint() -> Status:
    taint = {"key": "dedicated", "value": "search", "effect": "NoSchedule"}
    return (await in_a_cluster(gpu_node("gpu-1", A100, 8, taints=[taint]), **LARGE)).status()


@situation
async def the_model_does_not_fit() -> Status:
    return (await in_a_cluster(gpu_node("gpu-1", L4, 1), **LARGE)).status()


# Deletion


@situation
async def deleted_with_orphans_and_applied_again() -> Status:
    operator = await orphaned(replicas=2)
    apply_again(operator.cluster, replicas=2)
    await operator.settle()
    return operator.status()


@situation
async def orphans_that_another_tool_took_over() -> Status:
    operator = await orphaned()
    for kind, name in ((SERVICE, "demo"), (CONFIG_MAP, "demo-live")):
        operator.cluster.edit(
            kind, name, lambda live: live["metadata"]["labels"].update({"app.kubernetes.io/managed-by": "Helm"})
        )
    apply_again(operator.cluster)
    await operator.turn()
    return operator.status()


# Access


@situation
async def a_model_that_stops_answering() -> Status:
    operator = await served_model()
    operator.seconds += LONGEST_REPROBE_SECONDS + 1
    operator.model.unreachable = "/v1/completions gave no answer within 30 seconds"
    for _ in range(7):
        await operator.turn()
    return operator.status()


@situation
async def a_stored_node_port_without_authentication() -> Status:
    operator = FakeOperator(world(manifest(service={"type": "NodePort", "port": 80})))
    await operator.settle()
    return operator.status()
