"""/healthz, /readyz and /metrics; which watch is dead and which is merely idle; and kopf's pitfalls around them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millstream_operator import app
from millstream_operator.app import Operator
from millstream_operator.health import HealthServer
from millstream_operator.kopf_settings import EndlessBackoffs, kopf_settings
from millstream_operator.kube.client import ApiUnreachable
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import LLM_DEPLOYMENT, POD, SERVICE, WATCHED, Kind
from millstream_operator.kube.watch_freshness import OVERDUE_SECONDS, WatchFreshness
from millstream_operator.queue.work_queue import Result
from millstream_operator.settings import SettingsError, read_settings

IMAGE = {"MILLSTREAM_RUNTIME_IMAGE": "x"}


def operator() -> Operator:
    return Operator(read_settings(IMAGE | {"MILLSTREAM_LEADER_ELECTION": "Disabled"}))


def pod(version: int, name: str = "p") -> dict[str, Any]:
    labels = {"millstream.dev/deployment": "demo"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": name,
            "resourceVersion": str(version),
            "labels": labels,
        },
    }


class Now:
    """The steady clock of app.py."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(app, "steady_seconds", lambda: self.seconds)


class FakeClient:
    """GET of one object, or an API server that is away."""

    def __init__(self, live: dict[str, Any] | None, away: bool = False) -> None:
        self.live, self.away = live, away

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        if self.away:
            raise ApiUnreachable("GET: TimeoutError")
        return self.live


async def tell(one: Operator, kind: Kind, event: str | None, body: dict[str, Any]) -> None:
    await one._handler(kind)(event={"type": event, "object": body})


# Watches


async def test_a_watch_that_never_brings_what_was_written_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    now, one = Now(monkeypatch), operator()
    one.watches.client = FakeClient(pod(7))  # type: ignore[assignment]
    one.index.put(POD, pod(7))  # the answer to a write of ours, or a listing
    now.seconds = OVERDUE_SECONDS
    await one.watches.verify()
    assert one.problems() == [], "not yet"
    now.seconds += 1
    await one.watches.verify()
    (problem,) = one.problems()
    assert "the watch of Pod is dead" in problem
    assert "team/p" in problem
    await tell(one, POD, "MODIFIED", pod(7))
    assert one.problems() == [], "it was only slow"


async def test_an_api_server_that_is_away_makes_no_watch_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    now, one = Now(monkeypatch), operator()
    client = FakeClient(pod(7), away=True)
    one.watches.client = client  # type: ignore[assignment]
    one.index.put(POD, pod(7))
    for _ in range(20):
        now.seconds += OVERDUE_SECONDS
        await one.watches.verify()
        assert one.problems() == []
    client.away = False
    now.seconds += 20  # it is back: the watch has its whole time to come back, too
    await one.watches.verify()
    assert one.problems() == []


async def test_an_object_that_went_unseen_makes_no_watch_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that starts anew tells what is, not what went meanwhile."""
    now, one = Now(monkeypatch), operator()
    one.watches.client = FakeClient(None)  # type: ignore[assignment]
    one.index.put(POD, pod(7))
    now.seconds = OVERDUE_SECONDS + 1
    await one.watches.verify()
    now.seconds *= 10
    await one.watches.verify()
    assert one.problems() == []


async def test_an_idle_watch_is_never_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    now, one = Now(monkeypatch), operator()
    await tell(one, POD, "ADDED", pod(7))
    now.seconds = 1e6
    await one.watches.verify()
    assert one.problems() == []


async def test_a_later_state_or_the_deletion_also_shows_that_a_watch_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    now, one = Now(monkeypatch), operator()
    one.watches.client = FakeClient(pod(9))  # type: ignore[assignment]
    for name, event in (("a", "MODIFIED"), ("b", "DELETED")):
        one.index.put(POD, pod(7, name))
        await tell(one, POD, event, pod(8, name))
    now.seconds = 1e6
    await one.watches.verify()
    assert one.problems() == []


def test_events_of_one_kind_do_not_refresh_another() -> None:
    freshness = WatchFreshness(WATCHED, 0.0)
    freshness.expect(SERVICE, "team", "p", 5, 0.0)
    freshness.delivered(POD, "team", "p", 9, 300.0)
    (canary,) = freshness.overdue(300.0)
    freshness.verify(canary, 5)
    assert [sentence.split(" is ")[0] for sentence in freshness.dead(300.0)] == ["the watch of Service"]
    assert (freshness.age_seconds(POD, 310.0), freshness.age_seconds(SERVICE, 310.0)) == (10.0, 310.0)


def test_a_whole_listing_that_finds_nothing_new_refreshes_the_watch() -> None:
    freshness = WatchFreshness(WATCHED, 0.0)
    freshness.listed(POD, set(), 100.0)
    assert freshness.age_seconds(POD, 100.0) == 0.0
    freshness.expect(POD, "team", "p", 5, 200.0)
    freshness.listed(POD, {("team", "p")}, 200.0)
    assert freshness.age_seconds(POD, 200.0) == 100.0, "the listing knows something that the watch did not bring"
    freshness.listed(POD, set(), 300.0)
    assert freshness.age_seconds(POD, 300.0) == 0.0, "and now it is gone"


# Workers and readiness


async def test_a_hung_worker_is_a_problem_and_an_idle_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    one = operator()
    assert one.problems() == []
    monkeypatch.setattr(one.queue, "longest_running_seconds", lambda: app.HUNG_WORKER_SECONDS + 1)
    assert one.problems() == ["a worker has been busy for 601 seconds"]


def test_ready_is_who_has_listed_everything_leader_or_not() -> None:
    one = operator()
    assert one.not_ready() == ["the first listing is not done"]
    one.listings.complete = True
    assert one.not_ready() == []


# The server


async def ask(server: HealthServer, path: str) -> tuple[int, str, str]:
    runner = await server.start(0, "127.0.0.1")
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as answer:
            return answer.status, await answer.text(), answer.headers["Content-Type"]
    finally:
        await runner.cleanup()


def server_of(alive: Sequence[str] = (), ready: Sequence[str] = ()) -> HealthServer:
    return HealthServer(lambda: alive, lambda: ready, lambda: b"metric 1\n")


async def test_it_answers_ok_or_says_what_is_wrong() -> None:
    assert (await ask(server_of(), "/healthz"))[:2] == (200, "ok\n")
    assert (await ask(server_of(alive=["one", "two"]), "/healthz"))[:2] == (503, "one\ntwo\n")
    assert (await ask(server_of(alive=["one"]), "/readyz"))[:2] == (200, "ok\n")
    assert (await ask(server_of(ready=["not listed"]), "/readyz"))[:2] == (503, "not listed\n")
    status, text, content_type = await ask(server_of(), "/metrics")
    assert (status, text) == (200, "metric 1\n")
    assert content_type.startswith("text/plain; version=0.0.4")


async def test_a_check_that_fails_by_itself_is_a_bad_answer_and_no_silence() -> None:
    """kopf's pitfall 7: there, an exception in a probe makes the prober wait for a minute."""

    def fails() -> Sequence[str]:
        raise KeyError("bug")

    broken = HealthServer(fails, fails, lambda: b"")
    async with asyncio.timeout(30):
        assert (await ask(broken, "/healthz"))[:2] == (503, "the check itself failed: KeyError\n")


# Metrics


def samples(one: Operator) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(one.metrics.exposition().decode())
        for sample in family.samples
    }


async def test_the_metrics_count_what_happened() -> None:
    one = operator()
    stored = {
        **pod(3, "demo"),
        "kind": "LLMDeployment",
        "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "Starting"}]},
    }
    one.index.put(LLM_DEPLOYMENT, stored)
    one.index.put(LLM_DEPLOYMENT, {**pod(4, "new"), "kind": "LLMDeployment"})
    one.metrics.reconciled(Result.DONE, 0.2)
    one.metrics.reconciled(Result.RETRY, 0.2)
    one.metrics.write("apply", "LLMDeployment/status")
    one.metrics.error("409")
    one.queue.add(OwnerKey("team", "demo"))
    found = samples(one)
    expected = {
        ("reconciles_total", "done"): 1,
        ("reconciles_total", "not_leader"): 0,
        ("reconcile_duration_seconds_count",): 2,
        ("retries_total",): 1,
        ("writes_total", "LLMDeployment/status", "apply"): 1,
        ("api_errors_total", "409"): 1,
        ("queue_depth", "due"): 1,
        ("leader",): 1,
        ("llmdeployments", "False", "Starting"): 1,
        ("llmdeployments", "Unknown", ""): 1,
    }
    values = {key: found.get((f"millstream_operator_{key[0]}", *key[1:])) for key in expected}
    assert values == expected
    assert ("millstream_operator_queue_oldest_age_seconds",) in found
    assert ("millstream_operator_events_waiting",) in found
    assert {key[1] for key in found if key[0] == "millstream_operator_watch_freshness_seconds"} == {
        kind.kind for kind in WATCHED
    }
    assert found["process_resident_memory_bytes",] > 0


async def test_a_stand_by_counts_no_llmdeployments() -> None:
    """Else a sum over the replicas would count each one twice."""
    one = Operator(read_settings(IMAGE))
    one.index.put(LLM_DEPLOYMENT, {**pod(4, "new"), "kind": "LLMDeployment"})
    found = samples(one)
    assert found["millstream_operator_leader",] == 0
    assert not [key for key in found if key[0] == "millstream_operator_llmdeployments"]


# kopf's pitfalls


def test_kopf_never_gives_up_on_an_api_server_that_is_away() -> None:
    """Pitfall 5: its own list of retries ends after a minute, and the process with it."""
    backoffs = kopf_settings().networking.error_backoffs
    assert isinstance(backoffs, EndlessBackoffs)
    seconds = list(itertools.islice(backoffs, 1000))
    assert sum(seconds) > 3600
    assert max(seconds) <= 6, "recovered soon after it is back"
    assert not hasattr(backoffs, "__len__"), "kopf counts what it can"


def test_kopf_may_work_on_any_number_of_objects_at_once() -> None:
    """Pitfall 8: a limit below the number of objects is a deadlock."""
    assert kopf_settings().queueing.worker_limit is None


def test_kopf_serves_no_probe_and_has_no_handler_for_one() -> None:
    """Pitfall 7, at its root."""
    activities = [handler.activity for handler in operator().registry()._activities.get_all_handlers()]
    assert [activity.value for activity in activities if activity is not None] == ["authentication"]


# Settings


def test_leader_election_is_on_by_default() -> None:
    settings = read_settings(IMAGE)
    assert (settings.leader_election, settings.operator_namespace, settings.lease_name) == (
        True,
        "millstream-system",
        "millstream",
    )
    assert not read_settings(IMAGE | {"MILLSTREAM_LEADER_ELECTION": "Disabled"}).leader_election


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LEADER_ELECTION", "false"), ("OPERATOR_NAMESPACE", "Not A Name"), ("LEASE_NAME", "a/b")],
)
def test_a_bad_value_is_reported_with_its_variable(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"MILLSTREAM_{variable} is '{value}'"):
        read_settings(IMAGE | {f"MILLSTREAM_{variable}": value})
