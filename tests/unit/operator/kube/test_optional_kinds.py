"""Kinds that come and go: seen without rights on CRDs, gone without noise, and never on hearsay."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.client import ApiError, ApiUnreachable
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import OPTIONAL, POD_MONITOR, PROMETHEUS_RULE, SCALED_OBJECT, Kind
from millstream_operator.kube.optional_kinds import MISSES_UNTIL_GONE, OptionalKinds
from tests.support.fake_cluster import FakeCluster, FakeClusterClient, Fault

DEMO = OwnerKey("team", "demo")


def labelled(kind: Kind, name: str = "demo", namespace: str = "team") -> dict[str, Any]:
    labels = {"millstream.dev/deployment": "demo"}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": {}}


class Looking:
    def __init__(self, *installed: Kind, namespaces: tuple[str | None, ...] = (None,)) -> None:
        self.cluster, self.index = FakeCluster(), Index()
        self.cluster.installed |= set(installed)
        self.kinds = OptionalKinds(self.index, namespaces)

    async def discover(self, error: Exception | None = None, at: int = 0) -> tuple[set[OwnerKey], bool]:
        fault = Fault(at, error, writes_only=False) if error is not None else None
        self.client = FakeClusterClient(self.cluster, fault)
        found = await self.kinds.discover(self.client)
        return set(found.changed), found.other_kinds


async def test_a_cluster_without_any_costs_one_question_a_group() -> None:
    one = Looking()
    assert await one.discover() == (set(), False)
    assert [request.name for request in one.client.requests] == [
        "/apis/keda.sh/v1alpha1",
        "/apis/monitoring.coreos.com/v1",
    ]
    assert one.kinds.served == frozenset()


async def test_a_kind_is_served_when_its_own_plural_is_and_not_its_group_alone() -> None:
    one = Looking(PROMETHEUS_RULE)
    assert await one.discover() == (set(), True)
    assert one.kinds.served == {PROMETHEUS_RULE}
    assert one.kinds.names == {"PrometheusRule"}
    assert await one.discover() == (set(), False), "no news the second time"
    one.cluster.installed |= set(OPTIONAL)
    assert await one.discover() == (set(), True)
    assert one.kinds.served == set(OPTIONAL)


async def test_its_objects_are_indexed_and_a_change_of_one_concerns_its_owner() -> None:
    one = Looking(POD_MONITOR)
    one.cluster.put(labelled(POD_MONITOR))
    assert await one.discover() == ({DEMO}, True)
    assert one.index.get(POD_MONITOR, "team", "demo") is not None
    one.cluster.edit(POD_MONITOR, "demo", lambda live: live["spec"].update(edited=True))
    assert await one.discover() == ({DEMO}, False)
    one.cluster.remove(POD_MONITOR, "demo")
    assert await one.discover() == ({DEMO}, False)
    assert one.index.get(POD_MONITOR, "team", "demo") is None


async def test_a_kind_is_gone_when_it_was_missing_twice() -> None:
    """A CRD that is being replaced is away for a moment."""
    one = Looking(POD_MONITOR, SCALED_OBJECT)
    one.cluster.put(labelled(SCALED_OBJECT))
    await one.discover()
    one.cluster.uninstall(SCALED_OBJECT)
    for _ in range(MISSES_UNTIL_GONE - 1):
        assert await one.discover() == (set(), False)
        assert SCALED_OBJECT in one.kinds.served
    assert await one.discover() == ({DEMO}, True), "its objects went with it"
    assert one.kinds.served == {POD_MONITOR}
    assert one.index.get(SCALED_OBJECT, "team", "demo") is None
    one.cluster.installed.add(SCALED_OBJECT)
    assert await one.discover() == (set(), True)


async def test_one_look_that_misses_it_is_forgotten() -> None:
    one = Looking(SCALED_OBJECT)
    await one.discover()
    for _ in range(3):
        one.cluster.installed.clear()
        await one.discover()
        one.cluster.installed.add(SCALED_OBJECT)
        await one.discover()
    assert one.kinds.served == {SCALED_OBJECT}


ERRORS = [ApiUnreachable("GET: TimeoutError"), ApiError(503, "ServiceUnavailable", "the server is away")]


@pytest.mark.parametrize("error", ERRORS, ids=["unreachable", "503"])
async def test_no_answer_changes_nothing(error: Exception) -> None:
    one = Looking(*OPTIONAL)
    one.cluster.put(labelled(POD_MONITOR))
    await one.discover()
    for at in range(5):
        with pytest.raises(type(error)):
            await one.discover(error, at)
        assert one.kinds.served == set(OPTIONAL)
        assert one.index.get(POD_MONITOR, "team", "demo") is not None


async def test_a_kind_that_may_not_be_listed_is_not_used_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The operator's image is newer than the chart's rights."""
    one = Looking(SCALED_OBJECT)
    for _ in range(3):
        await one.discover(ApiError(403, "Forbidden", "may not list"), at=2)
        assert one.kinds.served == frozenset()
    assert caplog.text.count("may not list it") == 1
    await one.discover()
    assert one.kinds.served == {SCALED_OBJECT}


async def test_named_namespaces_are_listed_one_by_one() -> None:
    one = Looking(POD_MONITOR, namespaces=("team", "other"))
    for namespace in ("team", "other", "third"):
        one.cluster.put(labelled(POD_MONITOR, namespace=namespace))
    changed, _ = await one.discover()
    assert changed == {DEMO, OwnerKey("other", "demo")}
