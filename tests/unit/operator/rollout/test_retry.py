"""A rollout that failed for want of something in the cluster is tried again; one that failed by itself is not."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION
from millstream_operator.rollout.retry import PAUSES_SECONDS
from tests.support.fake_operator import FakeOperator
from tests.support.rollout_controller import ended
from tests.support.rollout_world import World, image, served

Manifest = dict[str, Any]


def pulling(detail: str) -> Manifest:
    waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "x": ErrImagePull: {detail}'}
    return {"containerStatuses": [{"name": "runtime", "restartCount": 0, "state": {"waiting": waiting}}]}


REGISTRY_AWAY = pulling("dial tcp: lookup registry: no such host")


def pass_time(one: World, seconds: float) -> None:
    now = datetime.datetime.fromisoformat(one.operator.now) + datetime.timedelta(seconds=seconds)
    one.operator.now = now.strftime("%Y-%m-%dT%H:%M:%SZ")


async def rolled_back(failing: Manifest = REGISTRY_AWAY) -> World:
    one = await served("ResourceAware")
    one.controller.failing["next"] = failing
    await one.apply(**image("next"))
    if one.images() != ["good"]:
        one.controller.let_the_deadline_pass()
        await one.settle()
    assert one.images() == ["good"]
    assert one.decisions[0] == "RolledBack"
    return one


async def fail_again(one: World) -> None:
    assert one.images() == []
    one.controller.let_the_deadline_pass()
    await one.settle()
    assert one.images() == ["good"]


async def test_an_outage_of_the_registry_is_tried_again_and_succeeds() -> None:
    one = await rolled_back()
    assert "tried again at 2025-01-01T00:10:00Z" in one.operator.condition("Ready")["message"]
    assert one.operator.condition("Stalled") == {}, "nobody has to do anything"
    assert one.operator.condition("Reconciling")["reason"] == "RolledBack"
    one.controller.failing.clear()
    pass_time(one, PAUSES_SECONDS[0] - 1)
    await one.settle()
    assert one.images() == ["good"]
    pass_time(one, 2)
    await one.settle()
    assert one.images() == ["next"]
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.decisions.count("RolloutRetried") == 1
    entry = next(entry for entry in one.status["decisions"] if entry["type"] == "RolloutRetried")
    assert "1 of 3" in entry["message"]
    assert "ImagePullFailed" in entry["message"]


async def test_the_attempts_are_bounded_and_their_pauses_grow() -> None:
    one = await rolled_back()
    for count, pause in enumerate(PAUSES_SECONDS, 1):
        pass_time(one, pause - 1)
        await one.settle()
        assert one.images() == ["good"], "not before its time"
        pass_time(one, 2)
        await one.settle()
        await fail_again(one)
        assert one.decisions.count("RolloutRetried") == count
        assert one.decisions.count("RolledBack") == count + 1, "each attempt is told"
    assert list(PAUSES_SECONDS) == sorted(set(PAUSES_SECONDS))
    assert "set spec.rollout.retry to another value" in one.operator.condition("Ready")["message"]
    assert one.operator.condition("Stalled")["reason"] == "RolledBack"
    one.operator.client.requests.clear()
    pass_time(one, 10 * 86400)
    await one.settle()
    assert one.operator.client.requests == []


async def test_a_restart_neither_forgets_an_attempt_nor_makes_one_more() -> None:
    one = await rolled_back()
    for count, pause in enumerate(PAUSES_SECONDS, 1):
        now = one.operator.now
        one.operator = FakeOperator(one.cluster)
        one.operator.now = now
        await one.settle()
        assert one.operator.writes == [], "a restart alone does nothing"
        pass_time(one, pause)
        await one.settle()
        await fail_again(one)
        assert one.decisions.count("RolloutRetried") == count
    newest = max(one.cluster.all(CONTROLLER_REVISION), key=lambda record: int(record["revision"]))
    assert newest["metadata"]["annotations"]["millstream.dev/retries"] == "3"


OWN: dict[str, Manifest] = {
    "no such image": pulling("failed to resolve reference: unknown: not found"),
    "no right to the image": pulling("401 Unauthorized"),
    "a crash": ended("Segmentation fault", restarts=3, code=139),
    "out of memory": ended('{"reason": "OutOfMemory", "message": "Too large."}', restarts=3),
    "a bad configuration": ended('{"reason": "InvalidConfig", "message": "No."}'),
    "late, for no known reason": ended("", restarts=1),
}


@pytest.mark.parametrize("name", OWN)
async def test_a_failure_of_its_own_is_not_tried_again(name: str) -> None:
    one = await rolled_back(OWN[name])
    assert "set spec.rollout.retry to another value" in one.operator.condition("Ready")["message"]
    assert one.operator.condition("Stalled")["reason"] == "RolledBack"
    one.operator.client.requests.clear()
    pass_time(one, 10 * 86400)
    await one.settle()
    assert one.images() == ["good"]
    assert one.operator.client.requests == []


@pytest.mark.parametrize("name", ["a crash", "out of memory", "late, for no known reason"])
async def test_another_value_of_retry_is_another_attempt(name: str) -> None:
    one = await rolled_back(OWN[name])
    rollout = {"strategy": "ResourceAware"}
    await one.apply(rollout=rollout | {"retry": "1"})
    await fail_again(one) if one.images() == [] else None
    assert one.decisions.count("RolledBack") == 2, "tried once, and failed for the same cause"
    one.operator.client.requests.clear()
    pass_time(one, 10 * 86400)
    now = one.operator.now
    one.operator = FakeOperator(one.cluster)
    one.operator.now = now
    await one.settle()
    assert one.operator.writes == [], "one value is one attempt, also for another process"
    await one.apply(rollout=rollout)
    assert one.decisions.count("RolloutRetried") == 1, "no value asks for nothing"
    one.controller.failing.clear()
    await one.apply(rollout=rollout | {"retry": "2"})
    assert one.images() == ["next"]
    assert one.operator.condition("Ready")["status"] == "True"
    entry = next(entry for entry in one.status["decisions"] if entry["type"] == "RolloutRetried")
    assert "spec.rollout.retry is '2'" in entry["message"]


async def test_a_value_that_was_there_when_it_failed_is_no_attempt() -> None:
    one = await served("ResourceAware")
    one.controller.failing["next"] = OWN["a crash"]
    await one.apply(rollout={"strategy": "ResourceAware", "retry": "1"}, **image("next"))
    assert one.images() == ["good"]
    assert "RolloutRetried" not in one.decisions


async def test_a_change_of_the_spec_ends_the_attempts() -> None:
    one = await rolled_back()
    await one.apply(**image("good"))
    pass_time(one, 10 * 86400)
    await one.settle()
    assert one.images() == ["good"]
    assert "RolloutRetried" not in one.decisions
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_record_of_an_older_operator_is_not_tried_again() -> None:
    one = await rolled_back()
    newest = max(one.cluster.all(CONTROLLER_REVISION), key=lambda record: int(record["revision"]))

    def as_before(record: Manifest) -> None:
        record["metadata"]["annotations"]["millstream.dev/failed"] = '{"reason": "ImagePullFailed", "message": "No."}'

    one.cluster.edit(CONTROLLER_REVISION, newest["metadata"]["name"], as_before)
    pass_time(one, 10 * 86400)
    await one.settle()
    assert one.images() == ["good"]
    assert "RolloutRetried" not in one.decisions


async def test_the_operator_comes_back_when_the_next_attempt_is_due() -> None:
    one = await rolled_back()
    put_off: list[float] = []
    now = one.operator.now
    one.operator = FakeOperator(one.cluster, later=lambda _, seconds: put_off.append(seconds))
    one.operator.now = now
    await one.operator.turn()
    assert PAUSES_SECONDS[0] + 1 in put_off
