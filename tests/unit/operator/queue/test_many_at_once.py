"""Many LLMDeployments at once: the pods of all come before the story of any."""

from __future__ import annotations

from millstream_operator.kube.kinds import DEPLOYMENT
from tests.support.fake_operator import FakeOperator, world


async def test_the_first_status_waits_for_the_pods_of_others_and_the_first_pods_do_not() -> None:
    operator = FakeOperator(world())
    operator.busy = True
    await operator.turn()
    assert operator.cluster.the(DEPLOYMENT)
    assert "conditions" not in operator.status()
    assert operator.retries, "it comes back"
    operator.busy = False
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "Starting"
