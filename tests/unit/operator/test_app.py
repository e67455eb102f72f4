"""The wiring: a watched event reaches the index and the queue, and nothing else happens in a handler."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from millstream_operator import listings
from millstream_operator.app import Operator
from millstream_operator.inventory.nodes import read_node
from millstream_operator.kopf_settings import EndlessBackoffs, kopf_settings
from millstream_operator.kube.client import ApiError, ApiUnreachable
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, POD, POD_MONITOR, WATCHED, Kind
from millstream_operator.settings import read_settings
from tests.support.fake_cluster import FakeCluster, FakeClusterClient, Fault
from tests.support.fake_operator import served
from tests.support.gpu_nodes import gpu_node
from tests.support.llmdeployments import manifest

DEMO = OwnerKey("team", "demo")


def operator(**environment: str) -> Operator:
    return Operator(read_settings({"MILLSTREAM_RUNTIME_IMAGE": "x"} | environment))


def pod(version: int = 1) -> dict[str, Any]:
    labels = {"millstream.dev/deployment": "demo"}
    metadata = {"name": "p", "namespace": "team", "uid": "p", "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


async def tell(one: Operator, kind: Kind, event: str | None, body: dict[str, Any]) -> list[OwnerKey]:
    """Hand an event to the kind's handler; the keys that it enqueued."""
    await one._handler(kind)(event={"type": event, "object": body})
    found = []
    while (key := one.queue.schedule.pop(float("inf"))) is not None:
        one.queue.schedule.done(key, 0.0, failed=False)
        found.append(key)
    return found


async def test_an_event_is_indexed_and_its_owner_enqueued_once() -> None:
    one = operator()
    assert await tell(one, POD, "ADDED", pod(1)) == [DEMO]
    assert await tell(one, POD, None, pod(1)) == [], "seen already"
    assert await tell(one, POD, "MODIFIED", pod(2)) == [DEMO]
    assert one.index.get(POD, "team", "p") is not None
    assert await tell(one, POD, "DELETED", pod(3)) == [DEMO]
    assert one.index.get(POD, "team", "p") is None


async def test_a_deleted_owner_is_forgotten() -> None:
    one = operator()
    stored = manifest()
    await tell(one, LLM_DEPLOYMENT, "ADDED", stored)
    assert await tell(one, LLM_DEPLOYMENT, "DELETED", stored) == [DEMO]
    assert one.index.get(LLM_DEPLOYMENT, "team", "demo") is None


def test_every_kind_is_watched_by_events_alone() -> None:
    """Other handlers of kopf would add finalizers and annotations to what they watch."""
    registry = operator().registry()
    assert {handler.id for handler in registry._watching.get_all_handlers()} == {kind.plural for kind in WATCHED}
    assert not list(registry._changing.get_all_handlers())
    assert not list(registry._spawning.get_all_handlers())


def test_kopf_is_held_to_what_the_operator_needs() -> None:
    settings = kopf_settings()
    assert settings.posting.enabled is False, "events are the reconciler's"
    assert settings.scanning.disabled is True, "no rights on CRDs and namespaces"
    selectors = settings.watching.label_selectors
    assert set(selectors.values()) == {"millstream.dev/deployment"}
    assert len(selectors) == len(WATCHED) - 1


def test_retries_of_watches_never_end_and_start_anew_each_time() -> None:
    backoffs = EndlessBackoffs()
    first = list(itertools.islice(backoffs, 200))
    assert all(0 < seconds <= 6 for seconds in first)
    assert next(iter(backoffs)) == first[0]


async def test_a_listing_finds_what_the_watches_missed() -> None:
    one, cluster = operator(), FakeCluster()
    cluster.put(manifest())
    one.client = one.listings.client = FakeClusterClient(cluster)
    await one.listings.resync()
    assert one.queue.schedule.pop(float("inf")) == DEMO
    one.queue.schedule.done(DEMO, 0.0, failed=False)
    await one.listings.resync()
    assert one.queue.schedule.pop(float("inf")) is None, "nothing new, nothing to do"
    cluster.remove(LLM_DEPLOYMENT, "demo")
    await one.listings.resync()
    assert one.queue.schedule.pop(float("inf")) == DEMO


@pytest.mark.parametrize("look", ["regular look", "take-over"])
async def test_what_was_deleted_while_nobody_watched_is_enqueued(look: str) -> None:
    """Its Deployment names an owner that is no more: no watch tells of that."""
    serving = (await served()).cluster
    serving.remove(LLM_DEPLOYMENT, "demo")
    one = operator()
    one.client = one.listings.client = FakeClusterClient(serving)
    await one.listings.first()
    for _ in range(2):
        one.queue.schedule.clear()
        if look == "take-over":
            one._enqueue_all()
        else:
            one.refresh_facts()
        assert one.queue.schedule.pop(float("inf")) == DEMO, "until it is stopped"
        one.queue.schedule.done(DEMO, 0.0, failed=False)
    serving.edit(DEPLOYMENT, "demo", lambda live: live["spec"].update(replicas=0))
    await one.listings.resync()
    one.queue.schedule.clear()
    one.refresh_facts()
    one._enqueue_all()
    assert one.queue.schedule.pop(float("inf")) is None


async def test_watched_namespaces_are_listed_one_by_one() -> None:
    one, cluster = operator(MILLSTREAM_WATCH_NAMESPACES="team,other"), FakeCluster()
    cluster.put(manifest())
    elsewhere = manifest()
    elsewhere["metadata"] |= {"namespace": "third", "uid": "another"}
    cluster.put(elsewhere)
    one.client = one.listings.client = FakeClusterClient(cluster)
    await one.listings.resync()
    assert [found["metadata"]["namespace"] for found in one.index.all(LLM_DEPLOYMENT)] == ["team"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ApiUnreachable("GET: ConnectionRefusedError"), "ConnectionRefusedError"),
        (ApiError(404, "NotFound", "page not found"), "kubectl apply -f crds/"),
        (ApiError(403, "Forbidden", "no rights"), "403 no rights"),
    ],
)
async def test_it_waits_for_the_api_server_and_says_for_what(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listings, "RESYNC_RETRY_SECONDS", 0.0)
    one = operator()
    one.client = one.listings.client = FakeClusterClient(FakeCluster(), Fault(0, error, writes_only=False))
    await one.listings.first()
    assert said in caplog.text


async def test_kinds_that_appear_concern_everybody() -> None:
    """A CRD is installed while the operator runs: it must discover the kind itself."""
    one, cluster = operator(), FakeCluster()
    cluster.put(manifest())
    one.client = one.listings.client = FakeClusterClient(cluster)
    await one.listings.resync()
    one.queue.schedule.clear()
    await one.listings.discover()
    assert one.queue.schedule.pop(float("inf")) is None, "no news"
    cluster.installed.add(POD_MONITOR)
    await one.listings.discover()
    assert one.queue.schedule.pop(float("inf")) == DEMO


async def test_a_kind_that_is_listed_and_not_watched_is_no_proof_of_a_dead_watch() -> None:
    one, cluster = operator(), FakeCluster()
    cluster.installed.add(POD_MONITOR)
    metadata = {"name": "demo", "namespace": "team", "labels": {"millstream.dev/deployment": "demo"}}
    cluster.put({"apiVersion": POD_MONITOR.api_version, "kind": "PodMonitor", "metadata": metadata, "spec": {}})
    one.client = one.listings.client = FakeClusterClient(cluster)
    await one.listings.discover()
    assert one.index.get(POD_MONITOR, "team", "demo") is not None
    assert one.freshness.overdue(float("inf")) == []


# Facts


async def test_other_gpus_or_prices_have_every_plan_looked_at_again_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "catalog.yaml"
    file.write_text("")
    one, cluster = operator(MILLSTREAM_GPU_CATALOG=str(file)), FakeCluster()
    cluster.put(manifest())
    cluster.put(gpu_node("a"))
    one.client = one.listings.client = FakeClusterClient(cluster)
    await one.listings.first()
    one.refresh_facts()
    while (key := one.queue.schedule.pop(float("inf"))) is not None:
        one.queue.schedule.done(key, 0.0, failed=False)
    one.refresh_facts()
    assert one.queue.schedule.pop(float("inf")) is None, "nothing new"
    file.write_text("L4-24GB: {listPriceUSDPerHour: 0.125}")
    one.refresh_facts()
    assert one.queue.schedule.pop(float("inf")) == DEMO
    one.queue.schedule.done(DEMO, 0.0, failed=False)
    one.facts.put_node("b", read_node(gpu_node("b")))
    one.refresh_facts()
    assert one.queue.schedule.pop(float("inf")) == DEMO


async def test_plans_are_looked_at_again_within_the_time_of_the_settings() -> None:
    one, cluster = operator(MILLSTREAM_RECHECK_SECONDS="2"), FakeCluster()
    names = {f"model-{number}" for number in range(40)}  # spread over 30 seconds some would come later
    for name in names:
        owner = manifest()
        owner["metadata"] |= {"name": name, "uid": name}
        cluster.put(owner)
    one.client = one.listings.client = FakeClusterClient(cluster)
    await one.listings.first()
    one.queue.schedule.clear()
    one.facts.put_node("b", read_node(gpu_node("b")))
    one.refresh_facts()
    due = set()
    while (key := one.queue.schedule.pop(asyncio.get_running_loop().time() + 2)) is not None:
        due.add(key.name)
    assert due == names


async def test_the_metrics_say_whether_gpus_and_prices_are_known(tmp_path: Path) -> None:
    one = operator(MILLSTREAM_GPU_CATALOG=str(tmp_path / "missing.yaml"))
    assert b"millstream_operator_inventory_known 0.0" in one.metrics.exposition(), "not listed yet"
    assert b"millstream_operator_gpu_catalog_valid 0.0" in one.metrics.exposition()
    one.client = one.listings.client = FakeClusterClient(FakeCluster())
    await one.listings.first()
    (tmp_path / "missing.yaml").write_text("")
    one.refresh_facts()
    assert b"millstream_operator_inventory_known 1.0" in one.metrics.exposition()
    assert b"millstream_operator_gpu_catalog_valid 1.0" in one.metrics.exposition()
