"""What a Job made lies in the volume of model.cache and goes with it: then it is made again."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, JOB, PERSISTENT_VOLUME_CLAIM, SERVICE_ACCOUNT
from millstream_operator.rendering.preparation_record import CACHE_UID_ANNOTATION
from tests.support import prepared_models
from tests.support.fake_cluster import Fault, Killed
from tests.support.fake_operator import FakeOperator, answer_to, respec, served, world
from tests.support.llmdeployments import manifest
from tests.support.prepared_models import (
    CACHE,
    CALIBRATED,
    LOCAL,
    Manifest,
    arguments,
    commands,
    dataset,
    preparing,
    records,
)

pytestmark = pytest.mark.deep

CLAIM, LATER = "demo-model-cache", "2025-01-01T01:00:00Z"
DRAFT: Manifest = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}}
MADE: Manifest = {"model": LOCAL | CACHE, "quantization": CALIBRATED}
TUNED: Manifest = {"model": LOCAL | CACHE, "speculation": DRAFT | {"tuning": {"dataset": dataset("traffic")}}}
COMMANDS = {"quantize": MADE, "tune-draft": TUNED}


def end_claim(operator: FakeOperator) -> None:
    """Somebody deletes the claim: it stays until the pods that mount it are gone."""
    ending = {"deletionTimestamp": "2025-01-01T00:00:00Z"}
    operator.cluster.edit(PERSISTENT_VOLUME_CLAIM, CLAIM, lambda live: live["metadata"].update(ending))


async def at_work(command: str) -> FakeOperator:
    """An operator whose Job with this command runs."""
    operator = FakeOperator(world(manifest(**COMMANDS[command])))
    while command not in commands(operator):
        operator.cluster.run_jobs(answer_to)
        operator.cluster.roll_out()
        await operator.turn()
    return operator


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
async def test_a_cache_that_somebody_deleted_is_filled_again_for_the_plan_that_is_kept(command: str) -> None:
    operator = await served(manifest(**COMMANDS[command]))
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
    assert command in await settled(operator)
    assert operator.condition("Ready")["status"] == "True"
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    assert len(records(operator)) == 1
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    assert command not in await settled(operator), "once"


async def test_while_the_model_is_made_again_the_status_says_so_and_the_workload_stays() -> None:
    operator = await served(manifest(**MADE))
    operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
    await operator.turn()
    await operator.turn()
    assert [arguments(job)[0] for job in operator.cluster.all(JOB)] == ["quantize"]
    assert operator.condition("Ready")["reason"] == "Quantizing"
    operator.cluster.remove(DEPLOYMENT, "demo")
    await operator.turn()
    assert operator.cluster.get(DEPLOYMENT, "demo") is not None


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_any_write_the_model_is_made_again(after: bool) -> None:
    for at in range(40):
        operator = await served(manifest(**MADE))
        operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
        operator.client.fault = Fault(at, Killed(), after=after)
        try:
            await settled(operator)
            break
        except Killed:
            await settled(FakeOperator(operator.cluster))
        uid = operator.cluster.the(PERSISTENT_VOLUME_CLAIM, CLAIM)["metadata"]["uid"]
        (record,) = records(operator)
        assert record["metadata"]["annotations"][CACHE_UID_ANNOTATION] == uid, f"killed at write {at}"
        assert operator.cluster.all(JOB) == [], f"killed at write {at}"
    assert at > 5


async def test_a_cache_that_ends_once_its_pods_have_left_it_is_left_alone() -> None:
    operator = await served(manifest(**MADE))
    end_claim(operator)
    await operator.turn()
    assert operator.cluster.all(JOB) == []
    assert operator.condition("Ready")["status"] == "True"


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


async def test_a_cache_that_is_deleted_while_its_model_is_judged_is_not_held_by_that_job() -> None:
    """The claim would stay until the Job that judges is deleted, and that Job until the model is made again."""
    operator = await preparing("quality", **prepared_models.MADE)
    operator.cluster.collect_garbage()
    end_claim(operator)
    await operator.turn()
    assert commands(operator) == ["quantize"]
    operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
    assert await settled(operator) == ["quantize", "quality"]
    assert operator.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("command", COMMANDS)
async def test_what_is_made_into_a_cache_that_is_being_deleted_is_made_again(command: str) -> None:
    operator = await at_work(command)
    end_claim(operator)
    operator.cluster.run_jobs(answer_to)
    await operator.turn()
    operator.cluster.collect_garbage()
    await operator.turn()
    operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
    assert command in await settled(operator)
    assert operator.condition("Ready")["status"] == "True"
    uid = operator.cluster.the(PERSISTENT_VOLUME_CLAIM, CLAIM)["metadata"]["uid"]
    (record,) = records(operator)
    assert record["metadata"]["annotations"][CACHE_UID_ANNOTATION] == uid


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_claim_that_comes_while_a_job_fills_the_one_before_it_is_filled_too(command: str) -> None:
    """`kubectl delete pvc`, and its finalizers taken away: the pod writes on into the volume that it has mounted."""
    operator = await at_work(command)
    operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
    operator.cluster.now = LATER
    await operator.turn()
    assert operator.cluster.get(PERSISTENT_VOLUME_CLAIM, CLAIM) is not None
    operator.cluster.run_jobs(answer_to)
    assert command in await settled(operator)
    assert operator.condition("Ready")["status"] == "True"
    assert len(records(operator)) == 1


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_claim_that_comes_before_the_pod_of_a_job_starts_is_filled_once(command: str) -> None:
    operator = await at_work(command)
    operator.cluster.remove(PERSISTENT_VOLUME_CLAIM, CLAIM)
    operator.cluster.now = LATER
    await operator.turn()
    operator.cluster.run_jobs(answer_to, started=LATER)
    assert command not in await settled(operator)
    assert operator.condition("Ready")["status"] == "True"
