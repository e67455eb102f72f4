"""Two releases over the same objects: one writes, the other says so, and takes over from one that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import DEPLOYMENT, LEASE, LLM_DEPLOYMENT
from millstream_operator.leadership.ownership import Release
from millstream_operator.queue.work_queue import RetryLater
from millstream_operator.reconciling.status_writer import StatusWriter
from tests.support.fake_cluster import FakeCluster, Fault
from tests.support.fake_operator import FakeOperator, respec, world
from tests.support.llmdeployments import NAMESPACE, manifest

Manifest = dict[str, Any]
A, B = Release("system-a", "a-millstream"), Release("system-b", "b-millstream")
PAGE = (Path(__file__).resolve().parents[4] / "docs/what-happens-when.md").read_text(encoding="utf-8")
KEY = OwnerKey(NAMESPACE, "demo")


def operator_of(cluster: FakeCluster, release: Release | None, **options: Any) -> FakeOperator:
    return FakeOperator(cluster, release=release, **options)


def renew(cluster: FakeCluster, release: Release, at: str) -> None:
    metadata = {"namespace": release.namespace, "name": release.name}
    cluster.put({"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": metadata, "spec": {"renewTime": at}})


async def served_by(release: Release | None) -> FakeOperator:
    """One that is Ready, with the Lease of its release renewed at the start of the day."""
    cluster = world(manifest())
    if release is not None:
        renew(cluster, release, "2025-01-01T00:00:00Z")
    operator = operator_of(cluster, release)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    return operator


def manager(cluster: FakeCluster) -> Any:
    return cluster.the(LLM_DEPLOYMENT)["status"].get("managedBy")


async def test_the_first_write_records_the_release_and_no_later_one_changes_it() -> None:
    owner = await served_by(A)
    assert owner.writes[0] == ("apply", "LLMDeployment/status")
    assert manager(owner.cluster) == {"namespace": "system-a", "name": "a-millstream"}
    before = owner.cluster.version
    for _ in range(3):
        await owner.turn()
    assert owner.cluster.version == before, "a steady state writes nothing"


async def test_another_release_writes_nothing_but_one_event() -> None:
    owner = await served_by(A)
    cluster = owner.cluster
    other = operator_of(cluster, B, image="registry.example.com/runtime:2")
    before, events = cluster.snapshot(), len(cluster.events)
    for minute in range(30):
        renew(cluster, A, f"2025-01-01T00:{minute:02}:00Z")
        other.seconds, other.now = 60.0 * minute, f"2025-01-01T00:{minute:02}:01Z"
        await other.turn()
    assert other.writes == []
    (event,) = cluster.events[events:]
    assert (event["reason"], event["type"]) == ("ManagedByAnother", "Warning")
    for part in ("team/demo", str(A), str(B), "10 minutes", "status.managedBy"):
        assert part in event["message"]
    assert f"Warning ManagedByAnother {event['message']}" in " ".join(PAGE.split())
    assert other.reconciler.left_to_others == 1
    after, lease = cluster.snapshot(), ("Lease", A.namespace, A.name)
    assert after.pop(lease) != before.pop(lease), "its Lease is renewed"
    assert after == before, "and nothing else"
    restarted = operator_of(cluster, B)
    await restarted.turn()
    assert cluster.events[-1]["metadata"] == event["metadata"], "the API server refuses it: it is there already"
    respec(cluster, replicas=2)
    await other.turn()
    assert other.writes == [], "nor for another spec"
    await owner.settle()
    assert cluster.the(DEPLOYMENT)["spec"]["replicas"] == 2


@pytest.mark.parametrize("gone", ["killed", "uninstalled", "long ago"])
async def test_the_objects_of_a_release_that_is_gone_are_taken_over_without_a_restart(gone: str) -> None:
    """Killed: its Lease stays and is not renewed. Uninstalled with its namespace: the Lease is gone."""
    cluster = (await served_by(A)).cluster
    template = cluster.the(DEPLOYMENT)["spec"]["template"]
    other = operator_of(cluster, B, image="registry.example.com/runtime:2")
    if gone == "uninstalled":
        cluster.remove(LEASE, A.name, A.namespace)
    await other.turn()
    if gone != "uninstalled":
        assert other.writes == []
        # Seen for ten minutes; or for one, and by renewTime the day before.
        other.seconds = 599.0 if gone == "killed" else 59.0
        other.now = "2024-12-31T00:00:00Z" if gone == "killed" else "2025-01-02T00:00:00Z"
        await other.turn()
        assert other.writes == []
        other.seconds += 12.0
        await other.turn()
    assert other.writes[0] == ("apply", "LLMDeployment/status")
    assert manager(cluster) == B.as_json()
    await other.settle()
    assert cluster.the(DEPLOYMENT)["spec"]["template"] == template
    assert other.condition("Ready")["status"] == "True"
    assert other.reconciler.left_to_others == 0
    back = operator_of(cluster, A)
    renew(cluster, B, "2025-01-02T00:00:00Z")
    await back.turn()
    assert back.writes == [], "the former release leaves it when it comes back"


async def test_an_object_of_a_release_that_did_not_know_the_field_is_adopted_by_one_write() -> None:
    cluster = (await served_by(None)).cluster
    assert manager(cluster) is None
    before = cluster.snapshot()
    newer = operator_of(cluster, A)
    await newer.settle()
    assert newer.writes == [("apply", "LLMDeployment/status")]
    after = cluster.snapshot()
    key = ("LLMDeployment", NAMESPACE, "demo")
    assert after[key]["status"].pop("managedBy") == A.as_json()
    assert after == before, "and nothing else differs"


async def test_of_two_that_find_it_unmanaged_the_slower_one_gets_a_conflict_and_leaves_it() -> None:
    cluster = world(manifest())
    renew(cluster, A, "2025-01-01T00:00:00Z")
    first, second = operator_of(cluster, A), operator_of(cluster, B)
    second.index.replace(LLM_DEPLOYMENT, cluster.all(LLM_DEPLOYMENT), cluster.version)
    await first.turn()
    with pytest.raises(RetryLater, match="409"):
        await second.reconciler.reconcile(KEY)
    await second.turn()
    assert manager(cluster) == A.as_json()
    assert second.writes == [("apply", "LLMDeployment/status")], "the one that was refused"


async def test_a_lease_that_may_not_be_read_takes_nothing_over_and_names_the_right() -> None:
    cluster = (await served_by(A)).cluster
    fault = Fault(0, ApiError(403, "Forbidden", "leases is forbidden"), writes_only=False)
    other = operator_of(cluster, B, fault=fault)
    await other.turn()
    assert other.writes == []
    assert "`get` on leases" in cluster.events[-1]["message"]


async def test_the_record_may_be_removed_to_hand_it_over() -> None:
    cluster = (await served_by(A)).cluster
    other = operator_of(cluster, B)
    await other.turn()
    cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["status"].pop("managedBy"))
    await other.turn()
    assert manager(cluster) == B.as_json()


async def test_a_turn_that_is_overtaken_does_not_take_the_object_back() -> None:
    """Its status meets a Conflict, and would be tried again on the newest state."""
    owner = await served_by(A)
    writer = StatusWriter(owner.client, owner.index, lambda: "2025-01-01T00:00:00Z", A)
    subject = owner.cluster.the(LLM_DEPLOYMENT)
    owner.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["status"].update(managedBy=B.as_json()))
    with pytest.raises(ApiError, match="has taken it over"):
        await writer.write(subject, {"managedBy": A.as_json()}, {})
    assert manager(owner.cluster) == B.as_json()


async def test_a_crd_without_the_field_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    refused = ApiError(400, "BadRequest", ".status.managedBy: field not declared in schema")
    operator = operator_of(world(manifest()), A, fault=Fault(0, refused))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert "apply the CRD of this release" in caplog.text
