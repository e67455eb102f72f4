"""`kubectl scale` to 0 and back in every state of a rollout: it converges, and a restart in between changes nothing.

state         at 0 replicas                         back at 1 replica
Progressing   Ready, ScaledToZero                   the new revision serves
WaitingForNode, NoRoom                              the new revision; its pod waits where no node takes it
GPUsTaken     Ready, ScaledToZero                   the new revision once there is room, else the last good one
RolledBack    RolledBack: the spec is not what runs the last good revision serves
Stopped       Ready, ScaledToZero                   the new revision, with nothing to lose any more
Complete      Ready, ScaledToZero                   the same revision serves
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from millstream_operator.kube.kinds import POD
from tests.support.fake_operator import respec
from tests.support.gpu_nodes import gpu_node
from tests.support.rollout_world import World, image, served_on_nodes
from tests.unit.operator.rollout.test_put_off import gpus, put_off
from tests.unit.operator.rollout.test_retry import REGISTRY_AWAY

pytestmark = pytest.mark.deep

State = Callable[[], Awaitable[World]]


async def progressing() -> World:
    one = await served_on_nodes(gpu_node("a", gpus=2))
    respec(one.cluster, **image("better"))
    await one.operator.turn()
    return one


async def waiting_for_node() -> World:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "Availability"})
    await one.apply(**image("better"))
    return one


async def no_room() -> World:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "ResourceAware"})
    one.cordon("a")
    await one.apply(**image("better"))
    return one


async def rolled_back() -> World:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "ResourceAware"})
    await one.apply(**image("bad"))
    return one


async def rolled_back_for_a_while() -> World:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": "ResourceAware"})
    one.controller.failing["next"] = REGISTRY_AWAY
    await one.apply(**image("next"))
    one.controller.let_the_deadline_pass()
    await one.settle()
    return one


async def stopped() -> World:
    one = await served_on_nodes(gpu_node("a", gpus=2), rollout={"strategy": "Availability"})
    await one.apply(**image("bad"))
    return one


async def complete() -> World:
    one = await served_on_nodes(gpu_node("a"))
    await one.apply(**image("better"))
    return one


# state -> its phase, Ready at 0 replicas, images that serve back at 1 replica
STATES: dict[str, tuple[State, str | None, str, list[str]]] = {
    "Progressing": (progressing, None, "ScaledToZero", ["better"]),
    "WaitingForNode": (waiting_for_node, "Blocked", "ScaledToZero", ["better"]),
    "NoRoom": (no_room, "Blocked", "ScaledToZero", []),
    "RolledBack": (rolled_back, "RolledBack", "RolledBack", ["good"]),
    "RolledBack, tried again": (rolled_back_for_a_while, "RolledBack", "RolledBack", ["good"]),
    "Stopped": (stopped, "Stopped", "ScaledToZero", []),
    "Complete": (complete, "Complete", "ScaledToZero", ["better"]),
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("state", STATES)
async def test_scaled_to_zero_and_back(state: str, *, restarted: bool) -> None:
    make, phase, at_zero, serving = STATES[state]
    one = await make()
    assert phase is None or one.status["rollout"]["phase"] == phase
    await one.apply(replicas=0)
    assert one.controller.pods() == []
    assert one.operator.condition("Ready")["reason"] == at_zero
    assert one.operator.condition("RolloutBlocked") == {}, "nothing serves that could be drained"
    if restarted:
        one.restart()
    await one.apply(replicas=1)
    assert one.images() == serving
    version = one.cluster.version
    one.restart()
    await one.settle()
    assert one.cluster.version == version, "and it is stable"
    assert len(one.controller.pods()) == 1, "a pod serves or waits"


@pytest.mark.parametrize("leaves", [False, True])
async def test_put_off_scaled_to_zero_and_back(*, leaves: bool) -> None:
    one = await put_off()
    await one.apply(replicas=0)
    assert one.operator.condition("Ready")["reason"] == "ScaledToZero"
    if leaves:
        one.cluster.remove(POD, "theirs")
    await one.apply(replicas=1)
    assert gpus(one) == ([2] if leaves else [1]), "the last good revision serves until there is room"
    if not leaves:
        assert one.operator.condition("RolloutBlocked")["reason"] == "GPUsTaken"
        one.cluster.remove(POD, "theirs")
        await one.settle()
    assert gpus(one) == [2]
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_retry_that_is_due_at_zero_replicas_is_an_attempt_when_it_is_scaled_up() -> None:
    one = await rolled_back_for_a_while()
    await one.apply(replicas=0)
    one.operator.now = "2025-01-01T00:10:01Z"
    del one.controller.failing["next"]
    await one.settle()
    assert one.operator.condition("Ready")["reason"] == "ScaledToZero"
    await one.apply(replicas=1)
    assert one.images() == ["next"]
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_node_that_comes_back_after_the_scale_takes_the_new_revision() -> None:
    one = await no_room()
    await one.apply(replicas=0)
    await one.apply(replicas=1)
    assert one.images() == []
    assert one.operator.condition("Ready")["reason"] == "Unschedulable"
    one.cordon("a", cordoned=False)
    await one.settle()
    assert one.images() == ["better"]
