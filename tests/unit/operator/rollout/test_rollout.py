"""Rollouts against a fake cluster that moves pods as Kubernetes does: by a surge, in place, on GPUs that are short."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT
from millstream_operator.planning.rollout_strategy import rollout_strategy
from tests.support.fake_operator import respec
from tests.support.gpu_nodes import gpu_node
from tests.support.llmdeployments import deployment
from tests.support.rollout_world import GPU, image, served, served_on_nodes

Manifest = dict[str, Any]


# Which strategy


@pytest.mark.parametrize(
    ("asked", "gpus", "spare", "strategy"),
    [
        ("Availability", 1, False, "Availability"),
        ("ResourceAware", 0, True, "ResourceAware"),
        ("Auto", 0, False, "Availability"),
        ("Auto", 1, True, "Availability"),
        ("Auto", 1, False, "ResourceAware"),
        ("Auto", 1, None, "Availability"),
        (None, 4, False, "ResourceAware"),
    ],
)
def test_the_strategy_follows_spec_plan_and_spare_gpus(
    asked: str | None, gpus: int, spare: bool | None, strategy: str
) -> None:
    owner = deployment(rollout={"strategy": asked} if asked else {})
    assert rollout_strategy(owner, {"gpusPerReplica": gpus}, spare).value == strategy


# Availability


@pytest.mark.parametrize("replicas", [1, 3])
async def test_availability_never_takes_a_pod_before_its_successor_answers(replicas: int) -> None:
    one = await served("Availability", replicas=replicas)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * replicas
    assert (one.controller.fewest_available, one.controller.most_pods) == (replicas, replicas + 1)
    assert one.status["rollout"]["strategy"] == "Availability"
    assert one.status["rollout"]["phase"] == "Complete"
    assert one.decisions == []


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bad", ["bad", "crashing"])
async def test_a_failing_revision_stops_at_one_pod_and_the_old_ones_serve_on(bad: str, replicas: int) -> None:
    one = await served("Availability", replicas=replicas)
    await one.apply(**image(bad))
    assert one.images() == ["good"] * replicas
    assert len(one.controller.made) == 1, "one pod of the new revision was ever made"
    assert one.decisions == ["RolloutStopped"]
    assert one.status["rollout"]["phase"] == "Stopped"
    message = one.status["decisions"][0]["message"]
    assert ("/models/x does not exist" in message) == (bad == "bad"), "the runtime's own last error"
    assert "the older ones serve on" in message
    assert one.operator.condition("Available")["status"] == "True"
    assert one.operator.condition("Ready")["reason"] == ("CheckpointInvalid" if bad == "bad" else "RuntimeCrashed")
    for _ in range(5):
        await one.operator.turn()
    assert one.decisions == ["RolloutStopped"], "announced once"


async def test_a_failing_revision_that_begins_at_zero_replicas_does_not_say_that_older_pods_serve() -> None:
    one = await served("Availability")
    await one.apply(replicas=0)
    await one.apply(replicas=1, **image("bad"))
    assert one.decisions == ["RolloutStopped"]
    assert "there are no older ones that serve" in one.status["decisions"][0]["message"]


async def test_what_was_announced_is_marked_on_the_record_and_needs_no_journal() -> None:
    """The journal is bounded: an attempt whose entry has dropped out of it is not announced a second time."""
    one = await served("Availability")
    await one.apply(**image("bad"))
    newest = max(one.cluster.all(CONTROLLER_REVISION), key=lambda record: int(record["revision"]))
    assert newest["metadata"]["annotations"]["millstream.dev/journaled"] == "RolloutStopped"
    one.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["status"].update(decisions=[]))
    await one.settle()
    assert one.decisions == []


async def test_back_to_the_old_spec_restarts_nothing_and_clears_the_failed_pod() -> None:
    one = await served("Availability")
    before = one.restarts()
    await one.apply(**image("bad"))
    await one.apply(**image("good"))
    assert one.restarts() == before
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.status["rollout"]["phase"] == "Complete"


# In place


@pytest.mark.parametrize("replicas", [1, 3])
async def test_in_place_one_pod_is_missing_at_a_time_and_none_is_added(replicas: int) -> None:
    one = await served("ResourceAware", replicas=replicas)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * replicas
    assert (one.controller.fewest_available, one.controller.most_pods) == (replicas - 1, replicas)
    assert one.status["rollout"] | {"currentRevision": "", "updateRevision": ""} == {
        "currentRevision": "",
        "updateRevision": "",
        "availableReplicas": replicas,
        "strategy": "ResourceAware",
        "phase": "Complete",
    }


async def test_in_place_is_announced_before_the_first_pod_is_drained() -> None:
    one = await served("ResourceAware")
    respec(one.cluster, **image("better"))
    await one.operator.turn()
    kinds = [(request.kind, request.subresource) for request in one.operator.client.written]
    assert kinds.index(("LLMDeployment", "status")) < kinds.index(("Event", None)) < kinds.index(("Deployment", None))
    assert one.cluster.events[-2]["reason"] == "ReplacingInPlace"
    entry = one.status["decisions"][0]
    assert entry["type"] == "ReplacingInPlace"
    assert "spec.rollout.strategy is ResourceAware" in entry["message"]
    assert one.status["rollout"]["phase"] == "Progressing"
    assert "in place" in one.operator.condition("Ready")["message"]
    await one.settle()
    assert one.decisions == ["ReplacingInPlace"], "announced once"


async def test_a_first_rollout_and_a_scale_drain_no_pod_and_announce_nothing() -> None:
    one = await served("ResourceAware")
    await one.apply(replicas=3)
    assert one.images() == ["good"] * 3
    assert one.decisions == []


# Auto on GPUs


async def test_auto_tries_the_surge_and_replaces_in_place_when_it_finds_no_gpu() -> None:
    """The deadlock of KubeRay 4239 and KServe 5452: the new pod waits for a GPU that only the old one can give up."""
    one = await served(replicas=2, gpus=2, accelerator=GPU)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * 2
    assert one.controller.most_pods == 3, "a surge was tried"
    assert one.controller.fewest_available == 1, "one at a time"
    assert one.decisions == ["ReplacingInPlace"]
    assert "no free GPU" in one.status["decisions"][0]["message"]
    assert one.operator.condition("Ready")["status"] == "True"


async def test_auto_does_not_turn_round_in_the_middle() -> None:
    """The drained pod's GPU is free for a moment: no reason to surge again."""
    one = await served(replicas=3, gpus=3, accelerator=GPU)
    seen: list[int] = []
    respec(one.cluster, **image("better"))
    await one.settle(lambda w: seen.append(w.cluster.the(DEPLOYMENT)["spec"]["strategy"]["rollingUpdate"]["maxSurge"]))
    assert sorted(seen, reverse=True) == seen, "from 1 to 0, and never back"
    assert one.images() == ["better"] * 3


async def test_auto_surges_where_a_gpu_is_spare() -> None:
    one = await served(replicas=2, gpus=3, accelerator=GPU)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * 2
    assert one.controller.fewest_available == 2
    assert one.decisions == []


async def test_more_replicas_than_gpus_is_no_rollout_and_drains_no_pod() -> None:
    one = await served(gpus=1, accelerator=GPU)
    before = one.restarts()
    await one.apply(replicas=2)
    assert before.items() <= one.restarts().items()
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.operator.condition("ReplicasBlocked")["reason"] == "InsufficientGPU"
    assert one.decisions == []


async def test_availability_that_is_insisted_on_waits_for_a_gpu() -> None:
    one = await served("Availability", gpus=1, accelerator=GPU)
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    ready = one.operator.condition("Ready")
    assert ready["reason"] == "InsufficientGPU"
    assert "rollout.strategy ResourceAware" in ready["message"], "and names the alternative"


async def test_where_no_gpu_is_spare_replicas_are_replaced_one_by_one_without_a_surge() -> None:
    one = await served_on_nodes(gpu_node("a", gpus=2), replicas=2)
    one.controller.most_pods = 0
    await one.apply(**image("better"))
    assert one.images() == ["better"] * 2
    assert (one.controller.most_pods, one.controller.fewest_available) == (2, 1)
    assert one.decisions == ["ReplacingInPlace"]
    assert "no GPU is spare" in one.status["decisions"][0]["message"]
