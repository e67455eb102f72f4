"""What fails in place goes back by itself, once, and the journal says why."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    NETWORK_POLICY,
    PERSISTENT_VOLUME_CLAIM,
    POD,
)
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.llmdeployments import manifest
from tests.support.rollout_controller import ended
from tests.support.rollout_world import CRASHED, GPU, World, image, served

Manifest = dict[str, Any]


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bad", ["bad", "crashing"])
async def test_what_fails_in_place_is_rolled_back_by_itself(bad: str, replicas: int) -> None:
    one = await served("ResourceAware", replicas=replicas)
    current = one.status["rollout"]["currentRevision"]
    await one.apply(**image(bad))
    assert one.images() == ["good"] * replicas
    tried = one.cluster.all(CONTROLLER_REVISION)[-1]["metadata"]["labels"]["millstream.dev/revision"]
    assert len([digest for digest in one.controller.made if digest != one.controller.made[-1]]) == 1, tried
    assert one.decisions == ["RolledBack", "ReplacingInPlace"]
    assert one.status["rollout"]["phase"] == "RolledBack"
    assert one.status["rollout"]["currentRevision"] == current
    ready = one.operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "RolledBack")
    assert f"Rolled back to revision {current}" in ready["message"]
    assert ("/models/x does not exist" if bad == "bad" else "Segmentation fault") in ready["message"]
    for kind, status in {"Available": "True", "ModelReady": "True", "Stalled": "True"}.items():
        assert one.operator.condition(kind)["status"] == status
    assert [event["type"] for event in one.cluster.events if event["reason"] == "RolledBack"] == ["Warning"] * 2


async def test_a_failed_revision_is_not_tried_again_and_nothing_is_written() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    one.controller.made.clear()
    one.operator.client.requests.clear()
    for _ in range(5):
        await one.settle()
    restarted = World(one.cluster)
    await restarted.settle()
    assert one.controller.made == restarted.controller.made == []
    assert one.operator.client.requests == restarted.operator.client.requests == []


async def test_scaling_and_repair_go_on_with_what_was_put_back() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    one.cluster.remove(DEPLOYMENT, "demo")
    await one.apply(replicas=2)
    assert one.images() == ["good"] * 2
    assert one.operator.condition("Ready")["reason"] == "RolledBack"


HUB: Manifest = {"source": {"huggingFace": {"repository": "org/name"}}}
LOCAL: Manifest = {"source": {"local": {"path": "demo-chat"}}}


async def test_what_was_put_back_may_download_what_the_failed_spec_does_not() -> None:
    """Else no new pod of it starts, once its node is lost."""
    one = await served("ResourceAware", model=HUB)
    opened = one.cluster.the(NETWORK_POLICY)["spec"]
    await one.apply(model=LOCAL, **image("bad"))
    assert one.operator.condition("Ready")["reason"] == "RolledBack"
    assert one.cluster.the(NETWORK_POLICY)["spec"] == opened
    await one.apply(model=LOCAL, **image("better"))
    assert one.images() == ["better"]
    assert len(one.cluster.the(NETWORK_POLICY)["spec"]["egress"]) == 1, "DNS: no pod downloads any more"


async def test_pods_that_serve_may_download_while_the_next_model_is_looked_into() -> None:
    one = await served(model=HUB)
    opened = one.cluster.the(NETWORK_POLICY)["spec"]
    respec(one.cluster, model={"source": {"persistentVolumeClaim": {"claimName": "models", "path": "a"}}})
    for _ in range(3):
        await one.operator.turn()
        assert one.operator.condition("Ready")["reason"] == "Inspecting"
        assert one.cluster.the(NETWORK_POLICY)["spec"] == opened


async def test_the_cache_of_what_served_stays_until_its_successor_has_answered() -> None:
    """It would be put back without it, and its pods would wait for a claim that is never made."""
    one = await served("ResourceAware", gpus=1, accelerator=GPU, model=HUB | {"cache": {"size": "2Gi"}})
    claim = one.cluster.the(PERSISTENT_VOLUME_CLAIM, "demo-model-cache")["metadata"]["uid"]
    one.controller.failing["slow"] = {}  # it loads and loads
    await one.apply(model=HUB, **image("slow"))
    assert one.images() == [], "drained"
    one.controller.failing["slow"] = CRASHED
    await one.settle()
    assert one.operator.condition("Ready")["reason"] == "RolledBack"
    assert one.images() == ["good"]
    assert one.cluster.the(PERSISTENT_VOLUME_CLAIM, "demo-model-cache")["metadata"]["uid"] == claim
    await one.apply(model=HUB, **image("better"))
    assert one.images() == ["better"]
    assert one.cluster.get(PERSISTENT_VOLUME_CLAIM, "demo-model-cache") is None


async def test_the_old_spec_makes_it_ready_at_once_without_a_restart() -> None:
    one = await served("ResourceAware", replicas=2)
    await one.apply(**image("bad"))
    before = one.restarts()
    await one.apply(**image("good"))
    assert one.restarts() == before
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.operator.condition("Stalled") == {}
    assert one.status["rollout"]["phase"] == "Complete"


async def test_the_old_spec_stays_as_it_was_rendered_even_for_a_newer_operator() -> None:
    one = await served("ResourceAware", engine={"maxNumSeqs": 4})
    await one.apply(**image("bad"))
    before = one.restarts()
    newer = World(one.cluster)
    newer.operator = FakeOperator(one.cluster, image="registry.example.com/runtime:2")
    await newer.apply(runtime={"image": "good"})
    assert newer.restarts() == before


async def test_a_new_spec_is_tried_and_so_is_the_failed_one_after_it() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    await one.apply(**image("better"))
    assert one.images() == ["better"]
    assert one.operator.condition("Ready")["status"] == "True"
    one.controller.failing.clear()  # somebody put the model where it belongs
    await one.apply(**image("bad"))
    assert one.images() == ["bad"], "the spec asked for it anew"
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_second_failure_of_the_same_revision_is_told_again() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    await one.apply(**image("good"))
    await one.apply(**image("bad"))
    assert one.images() == ["good"]
    assert one.decisions.count("RolledBack") == 2


async def test_what_may_pass_by_itself_is_given_up_at_the_deadline() -> None:
    one = await served("ResourceAware")
    one.controller.failing["slow"] = ended("", restarts=1)
    await one.apply(**image("slow"))
    assert one.images() == []
    assert one.decisions == ["ReplacingInPlace"], "one crash is no certainty"
    one.controller.let_the_deadline_pass()
    await one.settle()
    assert one.images() == ["good"]
    assert one.decisions[0] == "RolledBack"


async def test_an_image_that_does_not_exist_is_certain_and_a_registry_that_is_away_is_not() -> None:
    def pulling(detail: str) -> Manifest:
        waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "x": ErrImagePull: {detail}'}
        return {"containerStatuses": [{"name": "runtime", "restartCount": 0, "state": {"waiting": waiting}}]}

    one = await served("ResourceAware")
    one.controller.failing["denied-away"] = pulling("dial tcp: lookup registry: no such host")
    await one.apply(**image("denied-away"))
    assert one.images() == []
    one.controller.failing["unknown"] = pulling("failed to resolve reference: unknown: not found")
    await one.apply(**image("unknown"))
    assert one.images() == ["good"]
    assert "ImagePullFailed" in one.operator.condition("Ready")["message"]


async def test_a_revision_that_once_answered_is_not_given_up() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("better"))
    one.controller.failing["better"] = CRASHED
    (pod,) = one.controller.pods()
    one.cluster.remove(POD, pod["metadata"]["name"])
    await one.settle()
    assert one.images() == []
    assert one.operator.condition("Ready")["reason"] == "RuntimeCrashed"
    assert "RolledBack" not in one.decisions


async def test_a_first_revision_that_fails_has_nothing_to_go_back_to() -> None:
    one = World(world(manifest(**image("bad"), rollout={"strategy": "ResourceAware"})))
    await one.settle()
    assert one.operator.condition("Ready")["reason"] == "CheckpointInvalid"
    assert one.decisions == []


async def test_a_stuck_surge_is_rolled_back_rather_than_made_room_for() -> None:
    """Who turns to ResourceAware because the new pod does not come up must not lose the old one to it."""
    one = await served("Availability")
    before = one.restarts()
    await one.apply(**image("bad"))
    await one.apply(rollout={"strategy": "ResourceAware"})
    assert one.restarts() == before
    assert one.operator.condition("Ready")["reason"] == "RolledBack"


async def test_a_refused_spec_does_not_keep_a_failed_one_from_being_rolled_back() -> None:
    one = await served("ResourceAware")
    one.controller.failing["slow"] = ended("", restarts=0)
    await one.apply(**image("slow"))
    await one.apply(speculation={"method": "EAGLE"})
    one.controller.failing["slow"] = CRASHED
    (pod,) = one.controller.pods()
    one.cluster.set_status(POD, pod["metadata"]["name"], pod["status"] | CRASHED)
    await one.settle()
    assert one.images() == ["good"]


async def test_what_was_rolled_back_under_a_refused_spec_is_announced_when_the_spec_asks_for_it_again() -> None:
    """No journal is written under a refused spec, so the record must not say that the journal has the entry."""
    one = await served("ResourceAware")
    one.controller.failing["slow"] = ended("", restarts=0)
    await one.apply(**image("slow"))
    await one.apply(speculation={"method": "EAGLE"})
    one.controller.failing["slow"] = CRASHED
    (pod,) = one.controller.pods()
    one.cluster.set_status(POD, pod["metadata"]["name"], pod["status"] | CRASHED)
    await one.settle()
    assert one.decisions == ["ReplacingInPlace"]
    await one.apply(speculation=None)
    assert one.operator.condition("Ready")["reason"] == "RolledBack"
    assert one.decisions == ["RolledBack", "ReplacingInPlace"]
