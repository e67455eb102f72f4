"""The index: the newest state wins, from any source, and no deletion is missed."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.index import Index, OwnerKey, affected_owners
from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, POD, SERVICE, WATCHED, label_selector

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
    reference = {"kind": "LLMDeployment", "name": "owner", "uid": "x", "controller": True}
    assert affected_owners(SERVICE, child(1)) == {DEMO}
    assert affected_owners(SERVICE, child(1, ownerReferences=[reference])) == {DEMO, OwnerKey("team", "owner")}
    assert affected_owners(SERVICE, child(1, owner=None, ownerReferences=[reference])) == {OwnerKey("team", "owner")}
    assert affected_owners(SERVICE, child(1, owner=None)) == set()
    assert affected_owners(SERVICE, child(1, ownerReferences=[{**reference, "kind": "ReplicaSet"}])) == {DEMO}
    assert affected_owners(LLM_DEPLOYMENT, child(1, owner=None)) == {DEMO}


def test_the_server_is_asked_for_our_own_objects_alone() -> None:
    for kind in WATCHED:
        assert (label_selector(kind) is None) == (kind is LLM_DEPLOYMENT)


def test_paths_are_the_api_servers() -> None:
    assert SERVICE.path("team", "demo") == "/api/v1/namespaces/team/services/demo"
    assert DEPLOYMENT.path(None) == "/apis/apps/v1/deployments"
    status = LLM_DEPLOYMENT.path("team", "demo", "status")
    assert status == "/apis/millstream.dev/v1alpha1/namespaces/team/llmdeployments/demo/status"
