"""The index: the newest state wins, from any source, and no deletion is missed."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api import API_VERSION, GROUP
from millstream_operator.kube.index import Index, OwnerKey, affected_owners, owner_key
from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, POD, SERVICE, WATCHED, Kind, label_selector
from millstream_operator.queue.work_queue import WorkQueue

Manifest = dict[str, Any]
DEMO = OwnerKey("team", "demo")


def child(version: int, name: str = "demo", owner: str | None = "demo", uid: str = "u", **metadata: Any) -> Manifest:
    labels = {"millstream.dev/deployment": owner} if owner else {}
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels}
        | metadata,
    }


def test_an_older_state_never_replaces_a_newer_one() -> None:
    """Our own write's answer comes before the watch's event of the state before it."""
    index = Index()
    assert index.put(SERVICE, child(5))
    assert not index.put(SERVICE, child(4, uid="old"))
    assert not index.put(SERVICE, child(5))
    assert index.put(SERVICE, child(10)), "versions are numbers, not strings"
    assert (index.get(SERVICE, "team", "demo") or {})["metadata"]["resourceVersion"] == "10"


def test_a_deletion_takes_the_object_it_names_and_not_its_successor() -> None:
    index = Index()
    index.put(SERVICE, child(5, uid="second"))
    assert not index.remove(SERVICE, child(4, uid="first"))
    assert index.get(SERVICE, "team", "demo") is not None
    assert index.remove(SERVICE, child(6, uid="second"))
    assert not index.remove(SERVICE, child(6, uid="second"))
    assert index.children(DEMO, SERVICE) == []


def test_children_are_found_by_their_label() -> None:
    index = Index()
    index.put(SERVICE, child(1))
    index.put(SERVICE, child(2, name="b"))
    index.put(SERVICE, child(3, name="other", owner="other"))
    index.put(POD, child(4, name="pod"))
    assert [one["metadata"]["name"] for one in index.children(DEMO, SERVICE)] == ["b", "demo"]
    assert [one["metadata"]["name"] for one in index.children(DEMO, POD)] == ["pod"]
    index.put(SERVICE, child(5, name="b", owner="other"))
    assert [one["metadata"]["name"] for one in index.children(DEMO, SERVICE)] == ["demo"], "relabelled"


def test_managed_fields_are_not_kept() -> None:
    """They are half of an object's memory, and nothing here reads them."""
    index = Index()
    given = child(1, managedFields=[{"manager": "x"}])
    index.put(SERVICE, given)
    assert "managedFields" not in (index.get(SERVICE, "team", "demo") or {})["metadata"]
    assert "managedFields" in given["metadata"], "the caller's own is left alone"


def test_a_listing_forgets_what_is_gone_and_returns_the_affected_owners() -> None:
    index = Index()
    for version, name in ((1, "kept"), (2, "gone"), (3, "changed")):
        index.put(SERVICE, child(version, name=name, owner=name, uid=name))
    index.put(DEPLOYMENT, child(4, name="other-kind"))
    index.put(SERVICE, child(20, name="newer", owner="newer", uid="newer"))
    listed = [
        child(1, name="kept", owner="kept", uid="kept"),
        child(9, name="changed", owner="changed", uid="changed"),
        child(8, name="fresh", owner="fresh", uid="fresh"),
    ]
    changed = index.replace(SERVICE, listed, "10")
    assert {key.name for key in changed} == {"gone", "changed", "fresh"}
    assert {one["metadata"]["name"] for one in index.all(SERVICE)} == {"kept", "changed", "fresh", "newer"}
    assert len(list(index.all(DEPLOYMENT))) == 1
    assert index.replace(SERVICE, [*listed, child(20, name="newer", uid="newer")], "20") == set()


def test_a_change_concerns_its_label_and_its_owner() -> None:
    reference = {"apiVersion": API_VERSION, "kind": "LLMDeployment", "name": "owner", "uid": "x", "controller": True}
    assert affected_owners(SERVICE, child(1)) == {DEMO}
    assert affected_owners(SERVICE, child(1, ownerReferences=[reference])) == {DEMO, OwnerKey("team", "owner")}
    assert affected_owners(SERVICE, child(1, owner=None, ownerReferences=[reference])) == {OwnerKey("team", "owner")}
    assert affected_owners(SERVICE, child(1, owner=None)) == set()
    assert affected_owners(SERVICE, child(1, ownerReferences=[{**reference, "kind": "ReplicaSet"}])) == {DEMO}
    foreign = {**reference, "apiVersion": "example.com/v1"}
    assert affected_owners(SERVICE, child(1, ownerReferences=[foreign])) == {DEMO}, "a kind of another API"
    assert affected_owners(LLM_DEPLOYMENT, child(1, owner=None)) == {DEMO}
    newer = {**reference, "apiVersion": f"{GROUP}/v1beta1"}
    assert affected_owners(SERVICE, child(1, owner=None, ownerReferences=[newer])) == {OwnerKey("team", "owner")}


async def test_owners_of_two_kinds_with_one_name_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second kind of our API comes with its own label; keys already tell the two apart."""
    gateway = Kind(GROUP, "v1alpha1", "LLMGateway", "llmgateways", owned=False)
    monkeypatch.setattr("millstream_operator.kube.index.OWNERS", (LLM_DEPLOYMENT, gateway))
    labels = {"millstream.dev/deployment": LLM_DEPLOYMENT, "millstream.dev/gateway": gateway}
    monkeypatch.setattr("millstream_operator.kube.index.OWNER_LABELS", labels)
    theirs = OwnerKey("team", "demo", "LLMGateway")
    reference = {"apiVersion": API_VERSION, "kind": "LLMGateway", "name": "demo", "uid": "g", "controller": True}
    index = Index()
    index.put(SERVICE, child(1, name="model"))
    index.put(SERVICE, child(2, name="gateway", ownerReferences=[reference]))
    index.put(POD, child(3, name="pod", owner=None, labels={"millstream.dev/gateway": "demo"}))
    assert [one["metadata"]["name"] for one in index.children(DEMO, SERVICE)] == ["model"]
    assert [one["metadata"]["name"] for one in index.children(theirs, SERVICE)] == ["gateway"]
    assert (index.children(DEMO, POD), len(index.children(theirs, POD))) == ([], 1)
    assert owner_key(gateway, child(4)) == theirs
    assert affected_owners(gateway, child(4)) == {theirs}, "its label is for people"
    queue: WorkQueue[OwnerKey] = WorkQueue()
    for key in (DEMO, theirs, DEMO):
        queue.add(key)
    assert sum(queue.count().values()) == 2
    assert (str(DEMO), str(theirs)) == ("LLMDeployment team/demo", "LLMGateway team/demo")


def test_the_server_is_asked_for_our_own_objects_alone() -> None:
    for kind in WATCHED:
        assert (label_selector(kind) is None) == (kind is LLM_DEPLOYMENT)


def test_paths_are_the_api_servers() -> None:
    assert SERVICE.path("team", "demo") == "/api/v1/namespaces/team/services/demo"
    assert DEPLOYMENT.path(None) == "/apis/apps/v1/deployments"
    status = LLM_DEPLOYMENT.path("team", "demo", "status")
    assert status == "/apis/millstream.dev/v1alpha1/namespaces/team/llmdeployments/demo/status"


def test_kubectls_copy_of_the_whole_object_is_not_kept() -> None:
    index = Index()
    copied = "kubectl.kubernetes.io/last-applied-configuration"
    given = child(1, annotations={copied: "{}", "team": "a"})
    index.put(SERVICE, given)
    assert (index.get(SERVICE, "team", "demo") or {})["metadata"]["annotations"] == {"team": "a"}
    assert copied in given["metadata"]["annotations"], "the caller's own is left alone"
