"""When a live object says what is wanted: no write. When it does not: one write, and not one for ever."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from millstream_operator.kube.diff import APPLIED_ANNOTATION, LastApplied, matches, with_digest

Manifest = dict[str, Any]

WANTED: Manifest = {
    "metadata": {"name": "demo", "labels": {"app": "x"}},
    "spec": {
        "replicas": 1,
        "selector": {"app": "x"},
        "ports": [{"name": "http", "port": 80}],
        "args": ["serve", "--port=1"],
    },
}


def live(**changes: Any) -> Manifest:
    """What a server stores for WANTED: with its own fields, and `changes` by dotted path."""
    stored = copy.deepcopy(with_digest(WANTED))
    stored["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": []}
    stored["spec"]["ports"][0]["protocol"] = "TCP"
    stored["spec"]["clusterIP"] = "10.0.0.1"
    stored["status"] = {"x": 1}
    for path, value in changes.items():
        *parents, last = path.split("__")
        place: Any = stored
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else place[parent]
        place[int(last) if last.isdigit() else last] = value
    return stored


SAME: dict[str, Manifest] = {
    "with the server's own fields": live(),
    "with another manager's label": live(metadata__labels={"app": "x", "mesh": "on"}),
    "with another manager's annotation": live(
        metadata__annotations={**live()["metadata"]["annotations"], "team.example.com/x": "1"}
    ),
}
DIFFERENT: dict[str, Manifest] = {
    "a value": live(spec__replicas=2),
    "a value in a list": live(spec__ports__0__port=81),
    "an item more": live(spec__args=["serve", "--port=1", "--evil"]),
    "an item less": live(spec__args=["serve"]),
    "another order": live(spec__args=["--port=1", "serve"]),
    "a key more in a selector": live(spec__selector={"app": "x", "evil": "y"}),
    "a label gone": live(metadata__labels={}),
    "labels gone": live(metadata__labels=None),
    "a map that became a string": live(spec__selector="x"),
    "applied from another manifest": live(metadata__annotations={APPLIED_ANNOTATION: "0"}),
    "never applied by us": live(metadata__annotations=None),
}


@pytest.mark.parametrize("name", SAME)
def test_no_write_where_the_live_object_says_the_same(name: str) -> None:
    assert matches(SAME[name], with_digest(WANTED))
    assert not LastApplied().needs_apply(SAME[name], with_digest(WANTED))


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_write_where_it_says_something_else(name: str) -> None:
    assert not matches(DIFFERENT[name], with_digest(WANTED))
    assert LastApplied().needs_apply(DIFFERENT[name], with_digest(WANTED))


def test_a_write_where_there_is_nothing() -> None:
    assert LastApplied().needs_apply(None, with_digest(WANTED))


@pytest.mark.parametrize("empty", [None, "", {}, []])
def test_absent_and_empty_are_the_same(empty: Any) -> None:
    wanted = copy.deepcopy(WANTED)
    wanted["spec"]["nothing"] = empty
    stored = copy.deepcopy(with_digest(wanted))
    del stored["spec"]["nothing"]
    assert matches(stored, with_digest(wanted))


def test_zero_and_false_are_not_absent() -> None:
    for value in (0, False):
        wanted = copy.deepcopy(WANTED)
        wanted["spec"]["value"] = value
        stored = copy.deepcopy(with_digest(wanted))
        del stored["spec"]["value"]
        assert not matches(stored, with_digest(wanted))


def test_a_field_that_is_no_longer_wanted_is_noticed_by_the_digest() -> None:
    """Nothing else could tell it from a field that another manager added."""
    less = copy.deepcopy(WANTED)
    del less["spec"]["replicas"]
    assert LastApplied().needs_apply(live(), with_digest(less))


def test_stamping_depends_on_content_alone_and_leaves_the_manifest_as_it_was() -> None:
    before = copy.deepcopy(WANTED)
    assert with_digest(WANTED) == with_digest(dict(reversed(WANTED.items())))
    assert before == WANTED
    changed = copy.deepcopy(WANTED)
    changed["spec"]["replicas"] = 2
    digest = with_digest(changed)["metadata"]["annotations"][APPLIED_ANNOTATION]
    assert digest != with_digest(WANTED)["metadata"]["annotations"][APPLIED_ANNOTATION]


def test_a_value_that_the_server_rewrites_is_written_once() -> None:
    """Say we send `1000m` and it stores `1`: that is our own doing, and no edit."""
    last_applied, rewritten = LastApplied(), live(spec__replicas="1000m")
    assert last_applied.needs_apply(rewritten, with_digest(WANTED))
    last_applied.applied(rewritten, with_digest(WANTED))
    assert not last_applied.needs_apply(rewritten, with_digest(WANTED))
    edited = live(spec__replicas="2000m")
    assert last_applied.needs_apply(edited, with_digest(WANTED)), "an edit on top is still an edit"
    changed = copy.deepcopy(WANTED)
    changed["spec"]["args"] = ["serve"]
    assert last_applied.needs_apply(rewritten, with_digest(changed)), "and a new wish is still a wish"
    last_applied.forget("u")
    assert last_applied.needs_apply(rewritten, with_digest(WANTED))
