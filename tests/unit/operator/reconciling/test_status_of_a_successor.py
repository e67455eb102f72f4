"""A turn that outlives its LLMDeployment writes nothing onto the next one of that name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.reconciling.status_writer import StatusWriter
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
Meanwhile = Callable[[FakeCluster], object]


class BusyCluster(FakeCluster):
    """Lets somebody act just before a status arrives, which the operator's watches have not seen yet."""

    def __init__(self, meanwhile: Meanwhile, times: int = 1) -> None:
        super().__init__()
        self.meanwhile, self.times = meanwhile, times

    def apply(self, manifest: Mapping[str, Any], subresource: str | None) -> Manifest:
        if subresource == "status" and self.times:
            self.times -= 1
            self.meanwhile(self)
        return super().apply(manifest, subresource)


def replaced(cluster: FakeCluster) -> None:
    """`kubectl delete` and `kubectl apply` of another object with the same name."""
    cluster.remove(LLM_DEPLOYMENT, "demo")
    successor = manifest()
    successor["metadata"]["uid"] = "uid-of-the-successor"
    cluster.put(successor)


def edited(cluster: FakeCluster) -> None:
    cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].setdefault("labels", {}).update(team="x"))


def labelled_again(cluster: FakeCluster) -> None:
    version = cluster.version
    cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["metadata"].setdefault("labels", {}).update(v=version))


def busy(meanwhile: Meanwhile, times: int = 1) -> FakeOperator:
    cluster = BusyCluster(meanwhile, times)
    cluster.put(manifest())
    return FakeOperator(cluster)


async def test_a_successor_keeps_its_own_status() -> None:
    operator = busy(replaced)
    await operator.turn()
    live = operator.cluster.the(LLM_DEPLOYMENT)
    assert live["metadata"]["uid"] == "uid-of-the-successor"
    assert live["status"] == {"observedGeneration": -1}, "as the API server made it"
    assert ["deleted" in str(one) for one in operator.retries] == [True]
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_a_successor_that_the_watch_has_shown_costs_no_request() -> None:
    operator = busy(lambda _: None, 0)
    await operator.settle()
    subject, status = operator.cluster.the(LLM_DEPLOYMENT), {"observedGeneration": 1}
    replaced(operator.cluster)
    operator.index.replace(LLM_DEPLOYMENT, operator.cluster.all(LLM_DEPLOYMENT), operator.cluster.version)
    operator.client.requests.clear()
    writer = StatusWriter(operator.client, operator.index, lambda: operator.now)
    with pytest.raises(ApiError, match="deleted before its status was written"):
        await writer.write(subject, status, {})
    assert operator.client.requests == []


async def test_an_edit_during_the_turn_does_not_cost_the_status() -> None:
    operator = busy(edited)
    await operator.turn()
    assert operator.retries == []
    assert operator.status()["observedGeneration"] == 1
    assert operator.cluster.the(LLM_DEPLOYMENT)["metadata"]["labels"] == {"team": "x"}


async def test_an_object_that_changes_all_the_time_is_reported_by_a_later_turn() -> None:
    operator = busy(labelled_again, times=7)
    await operator.turn()
    assert len(operator.retries) == 1
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
