"""When a fault strikes: counted by scope, once, and by what counts."""

from __future__ import annotations

import pytest

from tests.soak.experiments import spread
from tests.soak.faults import Asked, Fault, Injection, Plan

CHILD = "/apis/apps/v1/namespaces/team/deployments/demo"


def asked(method: str = "GET", path: str = CHILD) -> Asked:
    return Asked(0.0, method, path)


@pytest.mark.parametrize(
    ("path", "namespace", "resource", "name"),
    [
        (CHILD, "team", "deployments", "demo"),
        ("/api/v1/namespaces/team/services", "team", "services", ""),
        ("/apis/millstream.dev/v1alpha1/namespaces/team/llmdeployments/demo/status", "team", "llmdeployments", "demo"),
        ("/api/v1/pods", "", "pods", ""),
        ("/api/v1/namespaces/team", "", "", ""),
    ],
)
def test_a_path_tells_what_it_is_about(path: str, namespace: str, resource: str, name: str) -> None:
    one = asked(path=path)
    assert (one.namespace, one.resource, one.name) == (namespace, resource, name)


def test_a_question_to_a_model_is_no_write() -> None:
    assert not asked("POST", "/api/v1/namespaces/team/services/demo:http/proxy/v1/completions").writes
    assert asked("POST", "/api/v1/namespaces/team/events").writes


def test_the_nth_request_is_hit_and_no_other() -> None:
    injection = Injection(Fault.CONFLICT, 3)
    assert [injection.strikes(asked()) for _ in range(5)] == [None, None, Fault.CONFLICT, None, None]
    assert injection.struck == asked()


def test_only_writes_may_be_counted() -> None:
    injection = Injection(Fault.KILLED_BEFORE, 2, only_writes=True)
    methods = ["GET", "PATCH", "GET", "DELETE", "PATCH"]
    hits = [injection.strikes(asked(method)) for method in methods]
    assert hits == [None, None, None, Fault.KILLED_BEFORE, None]


def test_each_namespace_has_its_own_count_and_the_whole_proxy_another() -> None:
    plan = Plan({"team": Injection(Fault.TIMEOUT, 1), "": Injection(Fault.CONFLICT, 3)})
    other = asked(path="/api/v1/namespaces/other/services/demo")
    assert [plan.strikes(one) for one in (other, asked(), other, asked())] == [
        None,
        Fault.TIMEOUT,
        Fault.CONFLICT,
        None,
    ]


@pytest.mark.parametrize("offset", range(12))
def test_a_sample_is_spread_over_all_places(offset: int) -> None:
    found = spread(10, 3, offset)
    assert len(found) == 3
    assert all(1 <= number <= 10 for number in found)
    assert spread(4, 9, offset) == [1, 2, 3, 4]


def test_every_place_is_in_some_sample() -> None:
    assert {number for offset in range(10) for number in spread(10, 1, offset)} == set(range(1, 11))


def test_events_are_counted_apart() -> None:
    event, service = (Asked(0.0, "POST", f"/api/v1/namespaces/team/{plural}") for plural in ("events", "services"))
    others, events = Injection(Fault.TIMEOUT, 2, about_events=False), Injection(Fault.TIMEOUT, 2, about_events=True)
    struck = [
        (others.strikes(asked) is not None, events.strikes(asked) is not None)
        for asked in (service, event, event, service)
    ]
    assert struck == [(False, False), (False, False), (False, True), (True, False)]
