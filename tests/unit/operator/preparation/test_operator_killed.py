"""An operator that dies while a model is quantized and judged: the next one ends where no fault would have."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from millstream_operator.kube.kinds import JOB
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import FakeOperator, answer_to, judged, respec, served
from tests.support.llmdeployments import manifest
from tests.support.prepared_models import FAILURE, MADE, Manifest, arguments, journal

pytestmark = pytest.mark.deep

BEGUN: dict[str, FakeCluster] = {}


def worse(job: Manifest) -> str:
    """What every Job says but the gate, which refuses the model."""
    return judged("failed", [FAILURE]) if arguments(job)[0] == "quality" else answer_to(job)


ANSWERS = {"passed": answer_to, "refused": worse}


async def asked_for() -> FakeCluster:
    """A world in which the model of 16 bits serves, and the spec asks for a quantized one with a gate."""
    if not BEGUN:
        operator = await served(manifest())
        respec(operator.cluster, **MADE)
        BEGUN["world"] = operator.cluster
    return copy.deepcopy(BEGUN["world"])


async def story(operator: FakeOperator, verdict: str) -> None:
    """Turns, with the other controllers in between, until no turn changes anything."""
    for _ in range(30):
        before = operator.cluster.version
        await operator.turn()
        operator.cluster.run_jobs(ANSWERS[verdict])
        operator.cluster.roll_out()
        operator.cluster.collect_garbage()
        if operator.cluster.version == before:
            return
    raise AssertionError(f"does not settle: {operator.client.written[-5:]}")


def comparable(operator: FakeOperator) -> dict[Any, Manifest]:
    """Without the pods, whose names count how many there were before."""
    return {key: live for key, live in operator.cluster.snapshot().items() if key[0] not in ("Pod", "Event")}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verdict", ANSWERS)
async def test_killed_at_any_write_each_step_is_done_once_and_the_end_is_the_same(verdict: str, after: bool) -> None:
    quiet = FakeOperator(await asked_for())
    await story(quiet, verdict)
    steps = ["QuantizationStarted", "ModelQuantized", "QualityGateStarted"]
    assert journal(quiet)[:4] == [*steps, "QualityGatePassed" if verdict == "passed" else "QualityGateFailed"]
    assert len(quiet.client.written) >= 8
    for at in range(len(quiet.client.written)):
        first = FakeOperator(await asked_for(), fault=Fault(at, Killed(), after=after))
        with pytest.raises(Killed):
            await story(first, verdict)
        assert first.condition("Available")["status"] == "True", "what served before goes on"
        second = FakeOperator(first.cluster)
        await story(second, verdict)
        assert comparable(second) == comparable(quiet), f"killed at write {at}"
        assert second.cluster.all(JOB) == []
