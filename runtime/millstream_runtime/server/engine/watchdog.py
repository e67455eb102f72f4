"""Watchdog of the engine: it must complete a step while requests run, and when a heartbeat is due.

    request submitted     ──▶ a step is due now      step completed ──▶ due now again, if other requests run
    idle                  ──▶ due at the next heartbeat, or never where heartbeats are off
    overdue by NO_PROGRESS_SECONDS ──▶ on_stalled            the next step ──▶ on_recovered
    overdue by STUCK_SECONDS       ──▶ on_stuck              which ends the engine

Any completed step counts, of a user, of the warm-up or of a heartbeat, so load never looks like a stall, however long
the queue is. A request that comes or goes does not move a deadline that is already running: clients that give up and
retry must not make a dead engine look alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# The largest step there is, a full token budget of prompt on a slow CPU, takes minutes. The alert
# MillstreamHeartbeatLate fires at the same age of the last step.
NO_PROGRESS_SECONDS = 300.0
# An engine that has not moved for twice as long (a kernel that never returns, a rank that waits for a lost one, a
# volume that hangs) does not recover. Until then a step that is only slow is not thrown away.
STUCK_SECONDS = 2 * NO_PROGRESS_SECONDS
LATE_TIMER_SECONDS = 1.0  # a timer that fires this late says something about this process, not about the engine


class StepDeadline:
    """Since when a step is due. Pure: moments are arguments, on one monotonic clock.

    Attributes:
        since_seconds: None where no step is due; in the future where a heartbeat will be.
    """

    def __init__(self, heartbeat_interval_seconds: float) -> None:
        self._interval_seconds = heartbeat_interval_seconds
        self.since_seconds: float | None = None

    def step_completed(self, now_seconds: float, *, is_busy: bool) -> None:
        """Record a completed step, or the answer of an idle engine; `is_busy`: requests are left."""
        if is_busy:
            self.since_seconds = now_seconds
        else:
            self.since_seconds = now_seconds + self._interval_seconds if self._interval_seconds > 0 else None

    def request_submitted(self, now_seconds: float) -> None:
        """Record that the engine got a request."""
        self.since_seconds = now_seconds if self.since_seconds is None else min(self.since_seconds, now_seconds)

    def heartbeat_interval_changed(self, interval_seconds: float, now_seconds: float, *, is_busy: bool) -> None:
        """Apply a new interval; 0 switches heartbeats off. An idle engine starts a new interval."""
        self._interval_seconds = interval_seconds
        if not is_busy:
            self.step_completed(now_seconds, is_busy=False)

    def overdue_seconds(self, now_seconds: float) -> float:
        """How long a step has been due; 0 while none is."""
        return 0.0 if self.since_seconds is None else max(0.0, now_seconds - self.since_seconds)


class EngineWatchdog:
    """Watches one engine after another, on the event loop, with one timer. A step does not touch the timer."""

    def __init__(
        self,
        limit_seconds: float,
        stuck_seconds: float,
        heartbeat_interval_seconds: float,
        *,
        on_stalled: Callable[[], None],
        on_recovered: Callable[[], None],
        on_stuck: Callable[[], None],
    ) -> None:
        self.limit_seconds = limit_seconds
        self.stuck_seconds = stuck_seconds
        self._deadline = StepDeadline(heartbeat_interval_seconds)
        self._on_stalled = on_stalled
        self._on_recovered = on_recovered
        self._on_stuck = on_stuck
        self._timer: asyncio.TimerHandle | None = None
        self._watching = False
        self._stalled = False

    def start(self) -> None:
        """Begin to watch an engine that is Ready."""
        self._watching, self._stalled = True, False
        self.step_completed(is_busy=False)

    def stop(self) -> None:
        """Stop watching: there is no engine."""
        self._watching = self._stalled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def step_completed(self, *, is_busy: bool) -> None:
        """See `StepDeadline`. The time of receipt counts, not of sending: this process may have slept."""
        self._deadline.step_completed(time.monotonic(), is_busy=is_busy)
        self._schedule()
        if self._stalled:
            self._stalled = False
            self._schedule(restart=True)
            self._on_recovered()

    def request_submitted(self) -> None:
        """See `StepDeadline.request_submitted`."""
        self._deadline.request_submitted(time.monotonic())
        self._schedule(restart=True)

    def heartbeat_interval_changed(self, interval_seconds: float, *, is_busy: bool) -> None:
        """See `StepDeadline.heartbeat_interval_changed`."""
        self._deadline.heartbeat_interval_changed(interval_seconds, time.monotonic(), is_busy=is_busy)
        self._schedule()

    def _schedule(self, *, restart: bool = False) -> None:
        """Have a timer while a step is due. One that fires too early starts itself again; it must not fire too late."""
        since_seconds = self._deadline.since_seconds
        if not self._watching or since_seconds is None or self._stalled or (self._timer is not None and not restart):
            return
        due_in_seconds = max(0.0, since_seconds + self.limit_seconds - time.monotonic())
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + due_in_seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(due_in_seconds, self._check_stalled)

    def _check_stalled(self) -> None:
        self._timer = None
        if self._deadline.overdue_seconds(time.monotonic()) < self.limit_seconds:
            self._schedule()
        elif not self._stalled:
            self._stalled = True
            self._start_stuck_timer()
            self._on_stalled()

    def _start_stuck_timer(self) -> None:
        """Count from when the stall was noticed: this process may have slept, and the engine with it."""
        left_seconds = max(0.0, self.stuck_seconds - self.limit_seconds)
        self._timer = asyncio.get_running_loop().call_later(left_seconds, self._check_stuck)

    def _check_stuck(self) -> None:
        timer, self._timer = self._timer, None
        if not self._stalled:
            self._schedule()
        elif timer is not None and asyncio.get_running_loop().time() - timer.when() > LATE_TIMER_SECONDS:
            self._start_stuck_timer()
        else:
            self._on_stuck()
