"""What a Job made lies in the volume of model.cache and goes with it: then it is made again."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONFIG_MAP, PERSISTENT_VOLUME_CLAIM, SERVICE_ACCOUNT
from millstream_operator.rendering.preparation_record import CACHE_UID_ANNOTATION
from tests.support.fake_operator import FakeOperator, answer_to, respec, served
from tests.support.llmdeployments import manifest
from tests.support.prepared_models import CACHE, CALIBRATED, LOCAL, Manifest, arguments, dataset, preparing, records

CLAIM = "demo-model-cache"
DRAFT: Manifest = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}}
MADE: Manifest = {"model": LOCAL | CACHE, "quantization": CALIBRATED}
TUNED: Manifest = {"model": LOCAL | CACHE, "speculation": DRAFT | {"tuning": {"dataset": dataset("traffic")}}}
COMMANDS = {"quantize": MADE, "tune-draft": TUNED}


async def settled(operator: FakeOperator) -> list[str]:
    """Run to the end. Returns what the Jobs ran meanwhile."""
    ran: list[str] = []

    def answer(job: Manifest) -> str:
        ran.append(arguments(job)[0])
        return answer_to(job)

    for _ in range(30):
        before = operator.cluster.version
        await operator.turn()
        operator.cluster.run_jobs(answer)
        operator.cluster.roll_out()
        operator.cluster.collect_garbage()
        if operator.cluster.version == before:
            return ran
    raise AssertionError("does not settle")


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_spec_that_goes_back_to_a_cache_that_was_deleted_has_it_made_again(command: str) -> None:
    operator = await served(manifest(**COMMANDS[command]))
    without: dict[str, Any] = {"quantization": None, "speculation": None, "model": LOCAL}
    respec(operator.cluster, **without)
    await settled(operator)
    assert operator.cluster.get(PERSISTENT_VOLUME_CLAIM, CLAIM) is None
    respec(operator.cluster, **COMMANDS[command])
    assert command in await settled(operator)
    assert operator.condition("Ready")["status"] == "True"
    assert len(records(operator)) == 1


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_cache_that_somebody_deleted_is_filled_again_with_the_next_plan(command: str) -> None:
    operator = await served(manifest(**COMMANDS[command]))
    operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
    ran = await settled(operator)
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    assert command in [*ran, *await settled(operator)]
    assert operator.condition("Ready")["status"] == "True"
    respec(operator.cluster, engine={"maxNumSeqs": 16})
    assert command not in await settled(operator), "once"


async def test_a_record_of_an_older_operator_holds_while_there_is_a_cache() -> None:
    operator = await served(manifest(**MADE))
    (record,) = records(operator)
    operator.cluster.edit(
        CONFIG_MAP, record["metadata"]["name"], lambda live: live["metadata"]["annotations"].pop(CACHE_UID_ANNOTATION)
    )
    later = FakeOperator(operator.cluster, image="registry.example.com/runtime:2")
    await later.turn()
    assert later.writes == []
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    assert await settled(later) == []


async def test_what_a_job_needs_is_repaired_while_it_waits() -> None:
    operator = await preparing("quantize", **MADE)
    for kind, name in ((PERSISTENT_VOLUME_CLAIM, CLAIM), (SERVICE_ACCOUNT, "demo")):
        operator.cluster.remove(kind, name)
        await operator.turn()
        assert operator.cluster.get(kind, name) is not None
