"""The work queue: a key once, one worker at a time, later after a failure, and never lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_operator.queue.schedule import FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, Schedule
from millstream_operator.queue.work_queue import RequeueAfter, RetryLater, WorkQueue


def schedule() -> Schedule[str]:
    return Schedule(jitter=random.Random(0))


# The pure half


def test_a_key_that_waits_is_not_added_twice() -> None:
    one = schedule()
    one.add("a", 1.0)
    one.add("a", 2.0)
    assert len(one) == 1
    assert one.pop(1.0) == "a"
    assert one.pop(9.0) is None


def test_the_earlier_time_counts() -> None:
    one = schedule()
    one.add("a", 5.0)
    one.add("a", 1.0)
    assert one.next_due() == 1.0
    assert one.pop(1.0) == "a"
    one.done("a", 1.0, failed=False)
    assert one.next_due() is None, "the later time is forgotten"


def test_nothing_is_handed_out_before_it_is_due_and_the_longest_due_goes_first() -> None:
    one = schedule()
    for key, due in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        one.add(key, due)
    assert one.pop(0.5) is None
    assert [one.pop(9.0) for _ in range(4)] == ["early", "middle", "late", None]


def test_a_key_that_is_worked_on_waits_for_its_worker_and_then_comes_back_once() -> None:
    one = schedule()
    one.add("a", 0.0)
    assert one.pop(0.0) == "a"
    for _ in range(3):
        one.add("a", 0.0)
    assert one.pop(9.0) is None
    one.done("a", 9.0, failed=False)
    assert [one.pop(9.0), one.pop(9.0)] == ["a", None]


def test_a_failure_comes_back_later_and_later_and_a_success_forgets_it() -> None:
    one = schedule()
    one.add("a", 0.0)
    now, waits = 0.0, []
    for _ in range(14):
        assert one.pop(now) == "a"
        one.done("a", now, failed=True)
        due = one.next_due()
        assert due is not None
        waits.append(due - now)
        now = due
    for failures, waited in enumerate(waits):
        doubled = min(FIRST_RETRY_SECONDS * 2**failures, LONGEST_RETRY_SECONDS)
        assert doubled / 2 <= waited <= doubled
    assert one.pop(now) == "a"
    one.done("a", now, failed=False)
    one.add("a", now)
    assert one.pop(now) == "a"
    one.done("a", now, failed=True)
    assert (one.next_due() or 0.0) - now <= FIRST_RETRY_SECONDS


def test_a_change_of_a_failing_key_does_not_wait_for_its_backoff() -> None:
    one = schedule()
    one.add("a", 0.0)
    one.pop(0.0)
    one.add("a", 0.0)  # its spec changed meanwhile
    one.done("a", 5.0, failed=True, at_least=100.0)
    assert one.pop(5.0) == "a"


def test_at_least_is_kept() -> None:
    one = schedule()
    one.add("a", 0.0)
    one.pop(0.0)
    one.done("a", 0.0, failed=True, at_least=30.0)
    assert one.pop(29.9) is None
    assert one.pop(30.0) == "a"


def test_a_thousand_failures_do_not_come_back_together() -> None:
    one = schedule()
    for number in range(1000):
        one.add(str(number), 0.0)
    while (key := one.pop(0.0)) is not None:
        one.done(key, 0.0, failed=True)
    dues = set()
    while (key := one.pop(1.0)) is not None:
        dues.add(key)
    assert len(dues) == 1000
    assert len({one.backoff(3) for _ in range(100)}) > 90


def test_many_failures_do_not_overflow() -> None:
    assert schedule().backoff(10_000) <= LONGEST_RETRY_SECONDS


def test_the_longest_running_key_is_reported() -> None:
    one = schedule()
    assert one.longest_running_seconds(5.0) == 0.0
    for key in ("a", "b"):
        one.add(key, 0.0)
    one.pop(1.0)
    one.pop(3.0)
    assert one.longest_running_seconds(5.0) == 4.0


def test_the_patient_let_others_pass_for_so_long_and_no_longer() -> None:
    one = schedule()
    one.add("patient", 0.0, patience=60.0)
    one.add("soon", 30.0)
    one.add("late", 61.0)
    assert [one.pop(100.0) for _ in range(4)] == ["soon", "patient", "late", None]


def test_patience_costs_nothing_where_no_other_key_is_due() -> None:
    one = schedule()
    one.add("patient", 0.0, patience=60.0)
    one.add("later", 5.0)
    assert one.pop(0.0) == "patient"


def test_who_was_patient_and_is_urgent_now_goes_first() -> None:
    one = schedule()
    one.add("a", 0.0, patience=60.0)
    one.add("b", 1.0)
    one.add("a", 0.5)
    assert [one.pop(2.0) for _ in range(3)] == ["a", "b", None]


def test_it_is_known_whether_somebody_waits_who_cannot() -> None:
    one = schedule()
    assert not one.next_is_urgent(0.0)
    one.add("patient", 0.0, patience=60.0)
    assert not one.next_is_urgent(0.0)
    one.add("urgent", 5.0)
    assert not one.next_is_urgent(4.0), "not due yet"
    assert one.next_is_urgent(5.0)
    assert one.pop(5.0) == "urgent"
    assert not one.next_is_urgent(5.0)


def test_a_failed_key_lets_others_pass_and_a_change_of_it_does_not() -> None:
    one = schedule()
    for key in ("failed", "news"):
        one.add(key, 0.0)
        one.pop(0.0)
    one.add("news", 0.0)
    for key in ("failed", "news"):
        one.done(key, 0.0, failed=True, patience=60.0)
    one.add("other", 1.0)
    assert [one.pop(50.0) for _ in range(3)] == ["news", "other", "failed"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "wait", "pop", "ok", "fail"])), max_size=60))
def test_a_key_never_runs_twice_at_once_and_is_never_lost(steps: list[tuple[str, str]]) -> None:
    """Any history: what was added after its last start will be handed out again."""
    one, running, owed, now = schedule(), set[str](), set[str](), 0.0
    for key, step in steps:
        now += 1.0
        if step in ("add", "wait"):
            one.add(key, now, patience=60.0 if step == "wait" else 0.0)
            owed.add(key)
        elif step == "pop":
            got = one.pop(now)
            if got is not None:
                assert got not in running
                running.add(got)
                owed.discard(got)
        elif key in running:
            running.discard(key)
            one.done(key, now, failed=step == "fail")
            if step == "fail":
                owed.add(key)
    for key in running:
        one.done(key, now, failed=False)
    handed_out = set()
    while (got := one.pop(now + 2 * LONGEST_RETRY_SECONDS)) is not None:
        handed_out.add(got)
    assert handed_out == owed


# On the event loop


async def worked(queue: WorkQueue[str], work: object, until: asyncio.Event, workers: int = 4) -> None:
    """Run the queue until an event is set; the limit only guards against a hang."""
    running = asyncio.create_task(queue.run(work, workers))  # type: ignore[arg-type]
    try:
        await asyncio.wait_for(until.wait(), 60)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_one_worker_a_key_and_different_keys_at_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    active: Counter[str] = Counter()
    together, finished, done = set[frozenset[str]](), Counter[str](), asyncio.Event()

    async def work(key: str) -> None:
        active[key] += 1
        assert active[key] == 1, f"{key} is worked on twice at once"
        together.add(frozenset(+active))
        if finished[key] == 0:
            queue.add(key)  # an event arrives while it is worked on
        await asyncio.sleep(0)
        active[key] -= 1
        finished[key] += 1
        if len(finished) == 3 and min(finished.values()) >= 2:
            done.set()

    for key in "abc":
        queue.add(key)
        queue.add(key)
    await worked(queue, work, done)
    assert max(len(keys) for keys in together) > 1
    assert finished == {"a": 2, "b": 2, "c": 2}, "added twice while waiting is once; added while running is once more"


async def test_a_bug_with_one_object_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    queue: WorkQueue[str] = WorkQueue()
    done, tries = asyncio.Event(), Counter[str]()

    async def work(key: str) -> None:
        tries[key] += 1
        if key == "broken":
            raise ValueError("a bug")
        if tries["broken"] >= 2:
            done.set()
        else:
            queue.add(key, 0.01)

    queue.add("broken")
    queue.add("fine")
    with caplog.at_level(logging.ERROR):
        await worked(queue, work, done, workers=1)
    assert tries["broken"] >= 2, "it is tried again"
    assert "broken: failed" in caplog.text


async def test_work_that_is_not_finished_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    queue: WorkQueue[str] = WorkQueue()
    done, tries = asyncio.Event(), Counter[str]()

    async def work(key: str) -> None:
        tries[key] += 1
        if tries[key] == 1:
            raise RetryLater("not yet")
        done.set()

    queue.add("a")
    with caplog.at_level(logging.WARNING):
        await worked(queue, work, done)
    assert tries["a"] == 2
    assert not caplog.records


async def test_what_waits_for_the_world_does_not_slow_down_what_fails_later() -> None:
    queue: WorkQueue[str] = WorkQueue()
    done, tries = asyncio.Event(), Counter[str]()

    async def work(key: str) -> None:
        tries[key] += 1
        if tries[key] <= 20:  # twenty failures in a row would wait for five minutes
            raise RequeueAfter("somebody else's object has the name", 0.0)
        if tries[key] == 21:
            raise RetryLater("not yet")
        done.set()

    queue.add("a")
    await worked(queue, work, done)
    assert tries["a"] == 22


async def test_a_delayed_key_does_not_hold_up_an_earlier_one() -> None:
    queue: WorkQueue[str] = WorkQueue()
    order: list[str] = []
    done = asyncio.Event()

    async def work(key: str) -> None:
        order.append(key)
        if key == "now":
            queue.add("end")
        if key == "end":
            done.set()

    queue.add("in an hour", 3600.0)
    running = asyncio.create_task(worked(queue, work, done, workers=1))
    await asyncio.sleep(0)
    queue.add("now")
    await running
    assert order == ["now", "end"]
