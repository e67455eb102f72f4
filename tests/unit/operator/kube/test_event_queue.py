"""Events in the background: in order, bounded, and nothing waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream_operator.kube import event_queue
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.event_queue import EventQueue
from millstream_operator.kube.fence import NotLeader


class Server:
    """A fake of the client: it keeps what is created, or raises one given error once."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.refusal: Exception | None = None

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if (refusal := self.refusal) is not None:
            self.refusal = None
            raise refusal
        self.created.append(manifest["message"])
        return manifest


def event(message: str) -> dict[str, Any]:
    return {"involvedObject": {"namespace": "team", "name": "demo"}, "message": message}


async def written(desk: EventQueue) -> None:
    """Let the desk write what waits."""
    running = asyncio.create_task(desk.run())
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def desk_of(server: Server, most_waiting: int = 10) -> EventQueue:
    return EventQueue(server, most_waiting=most_waiting)  # type: ignore[arg-type]


async def test_publishing_does_not_wait_and_events_are_written_in_order() -> None:
    server = Server()
    desk = desk_of(server)
    for message in "abc":
        await desk.publish(event(message))
    assert server.created == []
    await written(desk)
    assert server.created == ["a", "b", "c"]


async def test_an_event_that_is_refused_takes_no_other_with_it() -> None:
    server = Server()
    server.refusal = ApiError(403, "Forbidden", "namespace is being terminated")
    desk = desk_of(server)
    for message in "ab":
        await desk.publish(event(message))
    await written(desk)
    assert server.created == ["b"]


async def test_too_many_are_dropped_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    desk = desk_of(server, most_waiting=2)
    with caplog.at_level("INFO"):
        for message in "abc":
            await desk.publish(event(message))
    await written(desk)
    assert server.created == ["a", "b"]
    assert "team/demo: no Event written: 2 wait already" in caplog.text


async def test_work_goes_first_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_queue, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(event_queue, "MAX_POLLS", 5)
    server, looks = Server(), 0

    def busy() -> bool:
        nonlocal looks
        looks += 1
        return True

    desk = EventQueue(server, busy)  # type: ignore[arg-type]
    await desk.publish(event("a"))
    await written(desk)
    assert looks == 5
    assert server.created == ["a"]


async def test_a_replica_that_no_longer_leads_drops_its_events_and_queues_new_ones_when_it_leads_again() -> None:
    server = Server()
    server.refusal = NotLeader("this replica does not lead")
    desk = desk_of(server)
    for message in "ab":
        await desk.publish(event(message))
    await written(desk)
    await desk.publish(event("c"))
    await written(desk)
    assert server.created == ["c"]
