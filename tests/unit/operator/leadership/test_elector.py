"""The elector and what hangs on it: the fence moves with the Lease, waiters wake, and a stand-by takes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millstream_operator.kube.client import ApiError, ApiUnreachable
from millstream_operator.kube.fence import Fence, NotLeader
from millstream_operator.leadership.election import Election, LeaseRecord, ObservedLease
from millstream_operator.leadership.elector import Elector, new_identity
from millstream_operator.queue.work_queue import Result, RetryLater, WorkQueue


class FakeStore:
    """One Lease in memory; `error` is raised by the next requests, and `lost` loses the answer to a write."""

    def __init__(self) -> None:
        self.seen: ObservedLease | None = None
        self.error: Exception | None = None
        self.lost = False
        self.version = 0

    async def read(self) -> ObservedLease | None:
        if self.error:
            raise self.error
        return self.seen

    async def write(self, record: LeaseRecord, version: str | None) -> ObservedLease:
        if self.error:
            raise self.error
        if version != (self.seen.version if self.seen else None):
            raise ApiError(409, "Conflict", "modified")
        self.version += 1
        self.seen = ObservedLease(record, str(self.version))
        if self.lost:
            raise ApiUnreachable("PUT: TimeoutError")
        return self.seen


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    def __init__(self) -> None:
        self.store, self.clock, self.walls = FakeStore(), Clock(), iter(range(10_000))

    def elector(self, identity: str) -> tuple[Elector, Fence]:
        fence = Fence(self.clock)
        wall = lambda: f"t{next(self.walls)}"  # noqa: E731
        return Elector(self.store, Election(identity), fence, self.clock, wall), fence

    async def step(self, *electors: Elector, seconds: float = 0.0, of: float = 0.1) -> None:
        """Let so much time pass, with every elector doing what it has to."""
        end = self.clock.now + seconds
        while True:
            for one in electors:
                while await one.step() == 0.0:
                    pass
            if self.clock.now >= end:
                return
            self.clock.now += of


def may_write(fence: Fence) -> bool:
    try:
        fence.check()
    except NotLeader:
        return False
    return True


async def test_one_of_two_leads_and_only_its_fence_is_open() -> None:
    world = World()
    (one, first), (two, second) = world.elector("one"), world.elector("two")
    assert not may_write(first), "closed until the Lease says otherwise"
    await world.step(one, two, seconds=60.0)
    assert (one.leading, two.leading) == (True, False)
    assert (may_write(first), may_write(second)) == (True, False)
    assert one.term == 1


async def test_who_cannot_reach_the_api_server_stops_and_stands_by_and_leads_again_when_it_is_back() -> None:
    """Five minutes without an API server, and nothing is restarted."""
    world = World()
    one, fence = world.elector("one")
    await world.step(one)
    world.store.error = ApiUnreachable("GET: ConnectionRefusedError")
    await world.step(one, seconds=7.9)
    assert may_write(fence)
    await world.step(one, seconds=2.2)
    assert not may_write(fence)
    await world.step(one, seconds=300.0)
    assert not may_write(fence)
    world.store.error = None
    await world.step(one, seconds=1.0)
    assert may_write(fence)
    assert one.term == 2


async def test_the_fence_closes_by_itself_while_the_elector_waits_for_an_answer() -> None:
    world = World()
    one, fence = world.elector("one")
    await world.step(one)
    world.clock.now += 10.0
    assert not may_write(fence)


@pytest.mark.parametrize("error", [ApiError(500, "InternalError", "etcd"), ApiError(429, "TooManyRequests", "busy")])
async def test_an_error_is_tried_again_and_costs_no_leadership(error: ApiError) -> None:
    world = World()
    one, fence = world.elector("one")
    await world.step(one)
    world.store.error = error
    await world.step(one, seconds=5.0)
    world.store.error = None
    await world.step(one, seconds=20.0)
    assert may_write(fence)
    assert one.term == 1


async def test_missing_rights_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    one, fence = world.elector("one")
    world.store.error = ApiError(403, "Forbidden", "leases is forbidden")
    await world.step(one, seconds=60.0)
    assert not may_write(fence)
    assert caplog.text.count("leases is forbidden") == 1


async def test_a_lost_answer_is_found_out_about() -> None:
    world = World()
    (one, fence), (two, _) = world.elector("one"), world.elector("two")
    world.store.lost = True
    await world.step(one)
    assert not may_write(fence), "it holds the Lease and does not know it"
    world.store.lost = False
    await world.step(one, two, seconds=2.0)
    assert may_write(fence)
    assert not two.leading


async def test_a_released_lease_is_taken_over_at_the_next_look() -> None:
    world = World()
    (one, fence), (two, other) = world.elector("one"), world.elector("two")
    await world.step(one, two, seconds=5.0)
    await one.release()
    assert not may_write(fence)
    await world.step(two, seconds=2.1)
    assert may_write(other)


async def test_with_a_write_unanswered_the_lease_is_left_to_run_out() -> None:
    """The server may still be carrying it out, so the next leader must not begin yet."""
    world = World()
    (one, fence), (two, other) = world.elector("one"), world.elector("two")
    await world.step(one, two, seconds=5.0)
    with fence.write(15.0):
        pass  # no answer
    await one.release()
    await world.step(two, seconds=10.0)
    assert not may_write(other)
    await world.step(two, seconds=8.0)
    assert may_write(other)


async def test_somebody_elses_lease_is_not_released() -> None:
    world = World()
    (one, _), (two, other) = world.elector("one"), world.elector("two")
    await world.step(one, two, seconds=1.0)
    await two.release()
    assert one.leading
    assert not may_write(other)
    assert world.store.seen is not None
    world.store.seen = ObservedLease(replace(world.store.seen.record, holder="three"), "99")
    await one.release()
    assert world.store.seen.record.holder == "three"


async def test_a_free_lease_is_acquired_at_once_and_a_held_one_is_left_to_its_holder() -> None:
    world = World()
    (first, fence), (second, other) = world.elector("first"), world.elector("second")
    assert await first.acquire_if_free()
    assert first.leading
    assert may_write(fence)
    assert not await second.acquire_if_free()
    assert not may_write(other)
    await first.release()
    third, _ = world.elector("third")
    assert await third.acquire_if_free(), "released: no wait until it expires"


async def test_waiters_wake_when_leadership_comes_and_when_it_goes() -> None:
    world = World()
    one, _ = world.elector("one")
    came = asyncio.create_task(one.wait_until_leading())
    await asyncio.sleep(0)
    assert not came.done()
    await world.step(one)
    assert await came == 1
    gone = asyncio.create_task(one.wait_until_lost(1))
    await asyncio.sleep(0)
    assert not gone.done()
    assert world.store.seen is not None
    world.store.seen = ObservedLease(replace(world.store.seen.record, holder="two"), "99")
    await world.step(one, seconds=3.0)
    await gone
    assert not one.leading


async def test_a_term_that_ended_unnoticed_is_over() -> None:
    world = World()
    one, _ = world.elector("one")
    await world.step(one)
    world.clock.now += 30.0
    await world.step(one)
    assert one.leading
    await asyncio.wait_for(one.wait_until_lost(1), 60)
    assert await one.wait_until_leading() == 2


def test_each_process_has_an_identity_of_its_own() -> None:
    assert new_identity() != new_identity()


# The queue of a stand-by


async def test_a_stand_by_takes_no_key_and_forgets_those_that_wait() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("before")
    queue.stand_by()
    queue.add("meanwhile")
    assert len(queue.schedule) == 0
    queue.resume()
    queue.add("after")
    assert queue.count() == {"due": 1, "delayed": 0, "running": 0}


async def test_who_may_not_write_is_no_failure_and_does_not_come_back() -> None:
    """Not a retry, not a traceback: the leader does the work."""
    results: list[Result] = []
    queue: WorkQueue[str] = WorkQueue(observe=lambda result, _seconds: results.append(result))
    finished = asyncio.Event()

    async def work(key: str) -> None:
        if key == "last":
            finished.set()
            return
        raise NotLeader("not now") if key == "fenced" else RetryLater("not yet")

    task = asyncio.create_task(queue.run(work, 1))
    for key in ("fenced", "unfinished", "last"):
        queue.add(key)
    await finished.wait()
    await asyncio.sleep(0)
    assert results[:2] == [Result.NOT_LEADER, Result.RETRY]
    assert queue.count()["delayed"] == 1, "only the unfinished one"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_work_that_ends_after_the_stand_by_began_does_not_come_back() -> None:
    queue: WorkQueue[str] = WorkQueue()
    going, go_on = asyncio.Event(), asyncio.Event()

    async def work(_: str) -> None:
        going.set()
        await go_on.wait()
        raise RetryLater("not yet")

    task = asyncio.create_task(queue.run(work, 1))
    queue.add("a")
    await going.wait()
    queue.add("a")
    queue.stand_by()
    go_on.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(queue.schedule) == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
