"""A rollout behind Kueue whose quota is what runs already: one pod after another in place, and never the last one."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.rendering.kueue import QUEUE_LABEL
from tests.support.gpu_nodes import gpu_node
from tests.support.kueue import QueuedScheduler
from tests.support.rollout_world import World, image, on_nodes

Manifest = dict[str, Any]


async def queued(quota: int, *, gpus: int = 8, **spec: Any) -> World:
    """Image `good` serves in the queue team-a, on nodes with GPUs to spare."""
    one = on_nodes(gpu_node("a", gpus=gpus), **spec)
    one.controller.scheduler = QueuedScheduler(one.cluster, quota)
    labels = {QUEUE_LABEL: "team-a"}
    one.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].update(labels=labels))
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True", one.operator.status()
    one.controller.fewest_available = 1 << 10
    return one


def blocked(one: World) -> Manifest:
    return one.operator.condition("RolloutBlocked")


@pytest.mark.parametrize("gpus", [8, 2], ids=["GPUs to spare", "no GPU to spare"])
async def test_auto_gives_up_one_old_pod_at_a_time(gpus: int) -> None:
    one = await queued(2, gpus=gpus, replicas=2)
    await one.apply(**image("better"))
    assert one.images() == ["better", "better"]
    assert one.controller.fewest_available == 1
    assert one.operator.condition("Ready")["status"] == "True"
    assert "ReplacingInPlace" in one.decisions
    (entry,) = [one for one in one.status["decisions"] if one["type"] == "ReplacingInPlace"]
    assert "Kueue admits no further pod to the LocalQueue team-a" in entry["message"] or gpus == 2


@pytest.mark.parametrize("strategy", ["Auto", "Availability"])
@pytest.mark.parametrize("gpus", [8, 1], ids=["GPUs to spare", "no GPU to spare"])
async def test_the_only_pod_serves_on_and_the_way_out_is_said(strategy: str, gpus: int) -> None:
    one = await queued(1, gpus=gpus, rollout={"strategy": strategy})
    before = one.restarts()
    await one.apply(**image("better"))
    one.controller.let_the_deadline_pass()
    await one.settle()
    assert before.items() <= one.restarts().items()
    assert one.images() == ["good"]
    assert blocked(one)["reason"] == "QuotaExceeded"
    message = blocked(one)["message"]
    assert "Kueue" in message
    assert "LocalQueue team-a" in message
    assert "spec.rollout.strategy ResourceAware" in message
    assert "node" not in message
    assert message in one.operator.condition("Ready")["message"]
    assert one.operator.condition("Stalled") == {}
    one.restart()
    version = one.cluster.version
    await one.settle()
    assert one.cluster.version == version
    assert isinstance(one.scheduler, QueuedScheduler)
    one.cluster.put(gpu_node("b"))
    one.scheduler.quota = 2
    await one.settle()
    assert one.images() == ["better"]
    assert one.controller.fewest_available == 1


async def test_resource_aware_replaces_the_only_pod() -> None:
    one = await queued(1, rollout={"strategy": "ResourceAware"})
    await one.apply(**image("better"))
    assert one.images() == ["better"]


async def test_scaled_to_one_in_the_middle_the_last_pod_serves_on() -> None:
    one = await queued(2, replicas=2)
    one.controller.failing["better"] = {}  # it never gets ready, and does not fail
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    await one.apply(replicas=1)
    assert one.controller.fewest_available == 1


async def test_a_larger_pod_than_the_one_that_is_given_up_is_not_made_room_for() -> None:
    """Two quota, two pods of one GPU each: a pod of two GPUs would need both."""
    one = await queued(2, replicas=2, parallelism={"tensor": 1})
    await one.apply(parallelism={"tensor": 2})
    assert one.controller.fewest_available == 2
    assert blocked(one)["reason"] == "QuotaExceeded"
    assert "asks for 2 GPUs" in blocked(one)["message"]
