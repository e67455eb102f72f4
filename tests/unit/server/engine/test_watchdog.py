"""Only a lack of any progress turns readiness off; load never looks like a stall."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from millstream_runtime.boot import Phase
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.server.engine import watchdog
from millstream_runtime.server.engine.watchdog import EngineWatchdog, StepDeadline
from tests.support.engine_processes import serving_from_a_process
from tests.support.server_thread import PATIENCE_SECONDS, ServerThread, serving, wait_for
from tests.support.slow_steps import SlowSteps

pytestmark = pytest.mark.deep

TEXT = "/v1/completions"
LONG = {"model": "tiny", "prompt": "hi", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 2}


def test_no_step_is_due_while_idle_without_heartbeats() -> None:
    deadline = StepDeadline(heartbeat_interval_seconds=0)
    assert deadline.overdue_seconds(1e9) == 0.0
    deadline.step_completed(5.0, is_busy=False)
    assert deadline.overdue_seconds(1e9) == 0.0


def test_an_idle_engine_must_step_when_the_heartbeat_is_due() -> None:
    deadline = StepDeadline(heartbeat_interval_seconds=30)
    deadline.step_completed(100.0, is_busy=False)
    assert deadline.overdue_seconds(129.0) == 0.0
    assert deadline.overdue_seconds(135.0) == 5.0
    deadline.step_completed(135.0, is_busy=False)
    assert deadline.overdue_seconds(160.0) == 0.0


def test_any_step_counts_however_long_the_queue_is() -> None:
    deadline = StepDeadline(heartbeat_interval_seconds=0)
    deadline.request_submitted(10.0)
    for now in range(20, 100_000, 200):  # a thousand requests wait; one step every 200 s
        assert deadline.overdue_seconds(now) <= 200.0
        deadline.step_completed(float(now), is_busy=True)


@pytest.mark.quick
def test_clients_that_try_again_do_not_make_a_dead_engine_look_alive() -> None:
    deadline = StepDeadline(heartbeat_interval_seconds=0)
    for now in range(0, 600, 10):
        deadline.request_submitted(float(now))
    assert deadline.overdue_seconds(600.0) == 600.0


def test_a_request_is_due_at_once_however_far_the_heartbeat_is() -> None:
    deadline = StepDeadline(heartbeat_interval_seconds=86_400)
    deadline.step_completed(0.0, is_busy=False)
    deadline.request_submitted(10.0)
    assert deadline.overdue_seconds(40.0) == 30.0


def test_a_new_heartbeat_interval_applies_to_an_idle_engine_at_once() -> None:
    deadline = StepDeadline(heartbeat_interval_seconds=30)
    deadline.step_completed(0.0, is_busy=False)
    deadline.heartbeat_interval_changed(0, 20.0, is_busy=False)
    assert deadline.overdue_seconds(1e9) == 0.0
    deadline.heartbeat_interval_changed(1, 1000.0, is_busy=False)
    assert deadline.overdue_seconds(1001.5) == 0.5
    deadline.step_completed(2000.0, is_busy=True)
    deadline.heartbeat_interval_changed(0, 2010.0, is_busy=True)
    assert deadline.overdue_seconds(2020.0) == 20.0, "the step of a busy engine is due whatever the heartbeats are"


@contextmanager
def frozen(server: ServerThread, pid: int) -> Iterator[Future[httpx.Response]]:
    """Stop the engine process in the middle of a long answer, and let it go on afterwards if it still exists."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, TEXT, LONG)
        wait_for(lambda: server.server.service.admission.in_flight == 1, "the request")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def watch_patiently(server: ServerThread) -> None:
    """From now on a step of a busy machine is no stall."""
    watchdog = server.server.service.engine._watchdog
    watchdog.limit_seconds = watchdog.stuck_seconds = PATIENCE_SECONDS


def is_unresponsive(server: ServerThread) -> bool:
    return bool(server.get("/ready").json()["phase"] == "Unresponsive")


@pytest.mark.deep
def test_a_frozen_engine_is_not_ready_until_it_continues(tiny_model: Path) -> None:
    with serving_from_a_process(tiny_model, no_progress_seconds=1.0) as (server, engines):
        server.wait_ready()
        with frozen(server, engines.launched[0].pid) as running:
            wait_for(lambda: is_unresponsive(server), "the stall to be noticed")
            ready, health = server.get("/ready"), server.get("/health")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            assert ready.json()["message"] == ("The engine has completed no step for 1 s although requests wait.")
            assert (health.status_code, health.json()["status"]) == (200, "unresponsive")
            assert server.metric("millstream_ready", model_name="tiny") == 0.0
            refused = server.post(TEXT, SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unresponsive")
            assert refused.headers["retry-after"] == "1"
            watch_patiently(server)
        assert running.result().json()["usage"]["completion_tokens"] == 1500, "no answer was cut"
        wait_for(lambda: server.get("/ready").status_code == 200, "Ready again")
        assert server.get("/health").json() == {"status": "ok", "engine_restarts": 0}
        assert server.post(TEXT, SHORT).status_code == 200


@pytest.mark.deep
def test_an_engine_that_stays_frozen_is_killed_and_the_next_one_serves(tiny_model: Path) -> None:
    settings = {"no_progress_seconds": 0.5, "stuck_seconds": 2.0, "restart_delays_seconds": (0.0,)}
    with serving_from_a_process(tiny_model, **settings) as (server, engines):
        server.wait_ready()
        with frozen(server, engines.launched[0].pid) as running:
            wait_for(lambda: server.server.service.engine.restarts_total == 1, "the engine's end")
            watch_patiently(server)
            cut = running.result()
            assert (cut.status_code, cut.json()["error"]["code"]) == (503, "engine_failed")
            wait_for(lambda: server.get("/ready").status_code == 200, "Ready again")
        assert server.get("/health").json() == {"status": "ok", "engine_restarts": 1}
        assert server.post(TEXT, SHORT).status_code == 200


@pytest.mark.deep
def test_an_engine_that_gets_stuck_too_often_ends_the_server_with_the_reason(tiny_model: Path) -> None:
    settings = {"no_progress_seconds": 0.5, "stuck_seconds": 1.0, "heartbeat_interval_seconds": 1}
    with serving_from_a_process(tiny_model, **settings) as (server, engines):
        server.wait_ready()
        pid = engines.launched[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            server.join()
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert isinstance(server.failure, RuntimeFailure)
    assert server.failure.reason is FailureReason.RUNTIME_CRASHED
    assert server.failure.message == (
        "The engine has completed no step for 1 s although a heartbeat is due, so it was killed."
    )


async def test_a_watchdog_that_slept_itself_gives_the_engine_its_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen container freezes both processes: when it thaws, every timer is late, and no step was possible."""
    monkeypatch.setattr(watchdog, "LATE_TIMER_SECONDS", 0.02)
    stalled, recovered, stuck = asyncio.Event(), asyncio.Event(), asyncio.Event()
    watch = EngineWatchdog(0.01, 0.05, 0, on_stalled=stalled.set, on_recovered=recovered.set, on_stuck=stuck.set)
    watch.start()
    watch.request_submitted()
    await stalled.wait()
    time.sleep(0.2)  # noqa: ASYNC251 - the event loop is what sleeps here
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not stuck.is_set(), "the timer was due long ago, but the event loop was not awake to see a step"
    await asyncio.wait_for(stuck.wait(), 60)
    watch.stop()
    assert not recovered.is_set()


def test_an_idle_engine_that_misses_its_heartbeat_is_noticed_too(tiny_model: Path) -> None:
    settings = {"no_progress_seconds": 1.0, "heartbeat_interval_seconds": 1}
    with serving_from_a_process(tiny_model, **settings) as (server, engines):
        server.wait_ready()
        os.kill(engines.launched[0].pid, signal.SIGSTOP)
        try:
            wait_for(lambda: is_unresponsive(server), "the stall to be noticed")
            assert "a heartbeat is due" in server.get("/ready").json()["message"]
            watch_patiently(server)
        finally:
            os.kill(engines.launched[0].pid, signal.SIGCONT)
        wait_for(lambda: server.get("/ready").status_code == 200, "Ready again")


def test_a_drain_of_an_unresponsive_engine_waits_for_its_requests(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, no_progress_seconds=0.2) as server:
        server.wait_ready()
        slow.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, TEXT, SHORT)
            wait_for(lambda: is_unresponsive(server), "the stall to be noticed")
            server.begin_drain()
            wait_for(lambda: server.ledger.snapshot().phase is Phase.DRAINING, "the drain")
            slow.gate.set()
            assert running.result().status_code == 200
        server.join()
    assert server.failure is None
