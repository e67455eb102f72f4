"""A spec that is refused begins no rollout: a revision that never served gets no pods in place of one that does."""

from __future__ import annotations

import pytest

from tests.support.gpu_nodes import T4, gpu_node
from tests.support.rollout_world import image, served_on_nodes


@pytest.mark.parametrize("strategy", ["Auto", "ResourceAware", "Availability"])
async def test_a_blocked_revision_is_not_rolled_out_while_a_newer_spec_is_refused(strategy: str) -> None:
    one = await served_on_nodes(gpu_node("a"), rollout={"strategy": strategy})
    before = one.restarts()
    one.cordon("a")
    await one.apply(**image("crashing"))
    await one.apply(parallelism={"tensor": 8})
    assert one.operator.condition("Ready")["reason"] == "Infeasible"
    one.cordon("a", cordoned=False)
    await one.settle()
    assert before.items() <= one.restarts().items()
    assert one.controller.fewest_available == 1
    assert one.images() == ["good"]
    one.restart()
    await one.settle()
    assert one.images() == ["good"]


async def test_a_wait_for_a_node_that_ends_under_a_refused_spec_drains_nothing() -> None:
    one = await served_on_nodes(gpu_node("a"), gpu_node("t", T4), rollout={"strategy": "Auto"})
    one.scheduler.now = lambda: one.operator.now
    await one.apply(**image("crashing"))
    await one.apply(accelerator={"type": "GPU", "products": ["H100-80GB"]}, parallelism={"tensor": 8})
    one.operator.now = "2025-01-01T00:10:01Z"
    await one.settle()
    assert one.images() == ["good"]
    assert one.controller.fewest_available == 1
