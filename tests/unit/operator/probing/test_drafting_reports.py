"""Pods that speculate are asked now and then: seldom, a few, and never so that something waits for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.pod_access import PodUnreachable
from millstream_operator.probing.drafting_reports import (
    INTERVAL_SECONDS,
    MAX_ASKED,
    MAX_CONCURRENT,
    MAX_PER_SECOND,
    DraftingReports,
)

KEY = OwnerKey("team", "demo")
Manifest = dict[str, Any]


class Answers:
    """Pods whose counts grow with each question; `silent` ones do not answer."""

    def __init__(self, *silent: str) -> None:
        self.silent, self.asked, self.in_flight, self.most_in_flight = silent, Counter[str](), 0, 0
        self.was_asked = asyncio.Event()

    async def ready(self, pod: Mapping[str, Any], timeout_seconds: float) -> Manifest:
        name = pod["metadata"]["name"]
        self.asked[name] += 1
        self.was_asked.set()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        if name in self.silent:
            raise PodUnreachable("connection refused")
        checks = 100 * self.asked[name]
        return {"speculation": {"checks": checks, "draftTokens": 4 * checks, "acceptedTokens": 2 * checks}}

    async def metrics(self, pod: Mapping[str, Any], timeout_seconds: float) -> str:
        raise PodUnreachable("not asked here")


class Polled:
    """Reports that live in a time of their own."""

    def __init__(self, *silent: str) -> None:
        self.now, self.changed, self.answers = 0.0, list[OwnerKey](), Answers(*silent)
        self.reports = DraftingReports(self.answers, self.changed.append, lambda: self.now)

    async def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            await self.reports.poll_due()


def pods(*names: str) -> list[Manifest]:
    return [{"metadata": {"name": name, "uid": f"uid-{name}"}} for name in names]


async def test_a_pod_is_asked_about_once_a_minute_and_only_a_change_wakes() -> None:
    polled = Polled()
    polled.reports.follow(KEY, "r1", pods("a"))
    await polled.passes(3600)
    assert 50 <= polled.answers.asked["a"] <= 75
    assert polled.changed == [KEY], "the first state that is known"
    found = polled.reports.of(KEY)
    assert found is not None
    assert (found.is_drafting, found.accepted_percent) == (True, 50)


async def test_some_pods_of_an_owner_are_asked_and_none_after_it_is_gone() -> None:
    polled = Polled()
    polled.reports.follow(KEY, "r1", pods(*"abcdefgh"))
    await polled.passes(600)
    assert sorted(polled.answers.asked) == [*"abcdefgh"[:MAX_ASKED]]
    polled.reports.follow(KEY, "r1", [])
    polled.answers.asked.clear()
    await polled.passes(600)
    assert not polled.answers.asked
    assert polled.reports.of(KEY) is None


async def test_the_rate_of_questions_is_bounded_whatever_the_number_of_pods() -> None:
    polled = Polled()
    for number in range(300):
        polled.reports.follow(OwnerKey("team", f"m{number}"), "r1", pods(*(f"{number}-{place}" for place in range(4))))
    await polled.passes(130)
    polled.answers.asked.clear()
    await polled.passes(240)
    total = sum(polled.answers.asked.values())
    assert total <= 1.1 * MAX_PER_SECOND * 240
    assert len(polled.answers.asked) == 300 * MAX_ASKED, "each has its turn"
    assert polled.answers.most_in_flight <= MAX_CONCURRENT


async def test_a_silent_pod_is_asked_less_and_less_and_holds_up_no_other() -> None:
    polled = Polled("silent")
    polled.reports.follow(KEY, "r1", pods("silent", "speaks"))
    await polled.passes(2 * 3600)
    assert polled.answers.asked["silent"] < polled.answers.asked["speaks"] / 5
    assert polled.answers.asked["speaks"] >= 2 * 3600 / INTERVAL_SECONDS / 1.3


async def test_a_new_revision_starts_anew_and_what_the_status_knows_is_taken_over() -> None:
    polled = Polled()
    polled.reports.follow(KEY, "r1", pods("a"))
    await polled.passes(600)
    known = polled.reports.of(KEY)
    polled.reports.follow(KEY, "r2", pods("b"))
    assert polled.reports.of(KEY) is None
    restarted = Polled()
    restarted.reports.follow(KEY, "r1", pods("a"), known, 60.0)
    assert restarted.reports.of(KEY) == known
    await restarted.passes(600)
    assert restarted.changed == [], "nothing has changed"


async def test_a_loop_asks_until_it_is_cancelled() -> None:
    polled = Polled()
    task = asyncio.create_task(polled.reports.run())
    await asyncio.sleep(0)
    polled.now = -1000.0
    polled.reports.follow(KEY, "r1", pods("a"))
    polled.now = 0.0
    async with asyncio.timeout(60):
        await polled.answers.was_asked.wait()
    task.cancel()
