"""What the operator waits for without a watch is looked at again after the time of its settings, in every part."""

from __future__ import annotations

import pytest

from millstream_operator.kube.kinds import SERVICE_ACCOUNT
from tests.support.fake_operator import FakeOperator, world
from tests.support.inspected_models import hub
from tests.support.llmdeployments import Manifest, manifest
from tests.support.prepared_models import MADE

RECHECK_SECONDS = 7.0
# The part that waits -> a spec with which it does: another owner's ServiceAccount has the name.
WAITS: dict[str, Manifest] = {"requeue": {}, "inspector": {"model": hub()}, "preparer": MADE}


@pytest.mark.parametrize("part", WAITS)
async def test_a_blocker_is_looked_at_again_after_the_time_of_the_settings(part: str) -> None:
    cluster = world(manifest(**WAITS[part]))
    taken = {"apiVersion": "v1", "kind": SERVICE_ACCOUNT.kind, "metadata": {"name": "demo", "namespace": "team"}}
    cluster.put(taken)
    operator = FakeOperator(cluster, recheck_seconds=RECHECK_SECONDS)
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "NameConflict"
    assert operator.retries[-1].at_least_seconds == RECHECK_SECONDS
