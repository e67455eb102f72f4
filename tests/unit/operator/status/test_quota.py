"""A quota that refused pods: when it was seen, and what works without room for a surge."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT
from tests.support.fake_operator import FakeOperator, respec, served

Manifest = dict[str, Any]
MESSAGE = (
    'pods "demo-1-x" is forbidden: exceeded quota: team, requested: limits.memory=2Gi, used: limits.memory=2Gi, '
    "limited: limits.memory=3Gi"
)


def refuse(operator: FakeOperator, **times: str) -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": MESSAGE, **times}

    def change(live: Manifest) -> None:
        seen = {"observedGeneration": live["metadata"]["generation"], "updatedReplicas": 0}
        live["status"] |= seen | {"conditions": [failure]}

    operator.cluster.edit(DEPLOYMENT, "demo", change)


@pytest.mark.parametrize(
    ("times", "as_of"),
    [
        ({"lastUpdateTime": "2025-01-01T10:00:00Z"}, "used), as of 2025-01-01T10:00:00Z. "),
        ({"lastTransitionTime": "2025-01-01T09:00:00Z"}, "used), as of 2025-01-01T09:00:00Z. "),
        ({}, "used). "),
    ],
)
async def test_it_says_when_it_was_seen_and_that_a_replacement_in_place_works(times: Manifest, as_of: str) -> None:
    operator = await served()
    respec(operator.cluster, engine={"maxNumSeqs": 3})
    await operator.turn()
    refuse(operator, **times)
    await operator.turn()
    ready = operator.condition("Ready")
    assert ready["reason"] == "QuotaExceeded"
    assert f"limits.memory: 2Gi more requested, 2Gi of 3Gi {as_of}" in ready["message"]
    assert "rollout.strategy: ResourceAware" in ready["message"]
    operator.cluster.edit(DEPLOYMENT, "demo", lambda live: live["status"].update(conditions=[]))
    await operator.turn()
    assert operator.condition("Ready")["reason"] != "QuotaExceeded", "gone with the controller's own word"
