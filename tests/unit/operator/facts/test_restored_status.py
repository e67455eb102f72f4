"""A restored status holds only for this spec and these pods, and is verified within a minute or so."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.facts.restored_status import (
    LATEST_SECONDS,
    SOONEST_SECONDS,
    StatusRestorer,
    read_restored_status,
)
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, POD, SERVICE
from millstream_operator.reconciling.probe import SHORTEST_REPROBE_SECONDS
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, respec, served
from tests.support.gpu_nodes import L4, T4, gpu_node, spec_on_gpu
from tests.support.llmdeployments import deployment, manifest

Manifest = dict[str, Any]
KEY = OwnerKey("team", "demo")


def ready_since(cluster: FakeCluster, time: str) -> None:
    """As a kubelet tells it."""

    def report(live: Manifest) -> None:
        next(one for one in live["status"]["conditions"] if one["type"] == "Ready")["lastTransitionTime"] = time

    for pod in cluster.all(POD):
        cluster.edit(POD, pod["metadata"]["name"], report)


async def served_for_long(stored: Manifest | None = None) -> FakeOperator:
    """Ready, with pods that were ready before."""
    operator = await served(stored)
    ready_since(operator.cluster, "2024-12-31T00:00:00Z")
    return operator


class Restarted:
    """A new process, which records what it put off."""

    def __init__(self, cluster: FakeCluster, **options: Any) -> None:
        self.put_off: list[tuple[OwnerKey, float]] = []
        self.operator = FakeOperator(cluster, later=lambda key, seconds: self.put_off.append((key, seconds)), **options)
        self.seconds = 0.0
        self.operator.reconciler._restorer._clock = lambda: self.seconds

    async def turn(self) -> FakeOperator:
        await self.operator.turn()
        return self.operator


async def test_a_served_model_is_asked_again_within_a_minute_and_not_at_once() -> None:
    restarted = Restarted((await served_for_long()).cluster)
    operator = await restarted.turn()
    assert operator.model.questions == []
    assert operator.client.requests == [], "nothing is written"
    ((key, seconds),) = restarted.put_off
    assert key == KEY
    assert SOONEST_SECONDS <= seconds <= LATEST_SECONDS
    restarted.seconds = seconds
    await restarted.turn()
    assert [path for path, _ in operator.model.questions] == ["/ready", "/v1/completions"]
    assert operator.writes == []
    _, (_, later) = restarted.put_off
    assert later >= SHORTEST_REPROBE_SECONDS, "and then as every served model"


async def test_a_turn_in_between_changes_nothing_about_when_it_is_asked() -> None:
    """The queue keeps the earliest time of a key alone, so each turn says it again."""
    restarted = Restarted((await served_for_long()).cluster)
    await restarted.turn()
    restarted.seconds = 4.0
    await restarted.turn()
    (_, first), (_, second) = restarted.put_off
    assert second == pytest.approx(first - 4.0)
    assert restarted.operator.model.questions == []


async def test_hand_edits_are_repaired_at_once() -> None:
    cluster = (await served_for_long()).cluster
    cluster.remove(SERVICE, "demo")
    cluster.edit(DEPLOYMENT, "demo", lambda live: live["spec"].update(replicas=5))
    operator = await Restarted(cluster).turn()
    assert [kind for _, kind in operator.writes][:2] == ["Service", "Deployment"]
    assert cluster.the(DEPLOYMENT)["spec"]["replicas"] == 1


async def test_a_status_of_an_older_spec_is_not_restored() -> None:
    cluster = (await served_for_long()).cluster
    respec(cluster, engine={"maxNumSeqs": 8})
    restarted = Restarted(cluster)
    await restarted.operator.settle()
    assert restarted.operator.model.questions
    assert restarted.operator.condition("Ready")["observedGeneration"] == 2


async def test_a_pod_that_got_ready_since_then_is_asked_at_once() -> None:
    cluster = (await served_for_long()).cluster
    ready_since(cluster, "2025-01-02T00:00:00Z")
    operator = await Restarted(cluster).turn()
    assert operator.model.questions


async def test_plan_outdated_stays_until_the_plan_is_checked() -> None:
    first = await served_for_long(manifest(**spec_on_gpu()))
    cluster = first.cluster
    cluster.put(gpu_node("a", L4))
    respec(cluster, engine={"maxNumSeqs": 8})
    await first.settle()
    cluster.put(gpu_node("b", T4))
    await first.turn()
    assert first.condition("PlanOutdated")["reason"] == "NewFacts"
    ready_since(cluster, "2024-12-31T00:00:00Z")
    restarted = Restarted(cluster)
    await restarted.turn()
    assert restarted.operator.writes == []
    restarted.seconds = LATEST_SECONDS + 1
    await restarted.turn()
    assert restarted.operator.writes == []
    assert restarted.operator.condition("PlanOutdated")["reason"] == "NewFacts"


async def test_whoever_never_was_ready_is_looked_at_as_ever() -> None:
    restorer = StatusRestorer(lambda _key, _seconds: pytest.fail("nothing to put off"))
    assert restorer.restore(deployment(), KEY, {}, []) is None
    status = (await served_for_long()).cluster.the(LLM_DEPLOYMENT)["status"]
    assert read_restored_status(deployment(), status, []) is not None
    status["conditions"][0]["observedGeneration"] += 1
    assert read_restored_status(deployment(), status, []) is None, "of another generation"


async def test_one_failed_probe_does_not_make_a_serving_model_unready() -> None:
    restarted = Restarted((await served_for_long()).cluster)
    operator = restarted.operator
    await restarted.turn()
    restarted.seconds = LATEST_SECONDS + 1
    operator.model.unreachable = "/ready gave no answer within 5 seconds"
    await restarted.turn()
    assert operator.retries, "it is asked again"
    assert operator.writes == []
    assert operator.condition("Ready")["status"] == "True"
    for _ in range(6):
        await restarted.turn()
    assert operator.condition("Ready")["reason"] == "ServiceUnreachable", "often enough to be sure"
