"""Does the engine get on? It owes a step while requests run, and when a heartbeat is due. Only silence counts.

    a request comes ──▶ owed since now       a step ends ──▶ owed since now, if others run
    idle            ──▶ owed when the next heartbeat is due, or never where heartbeats are off
    owed for NO_PROGRESS_SECONDS and not one step ──▶ on_silence        the next step ──▶ on_life
    owed for STUCK_SECONDS                        ──▶ on_stuck          which ends it

Any completed step counts, of a user, of the warm-up or of a heartbeat, so load never looks like silence, however long
the queue is. A request that comes or goes changes nothing for an engine that owes a step already: clients that give up
and try again must not make a dead engine look alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# The largest step there is, a full token budget of prompt on a slow CPU, takes minutes. It is also the age of the last
# step at which the alert MillstreamHeartbeatLate fires.
NO_PROGRESS_SECONDS = 300.0
# What has stood still for twice as long (a kernel that never returns, a rank that waits for a lost one, a volume that
# hangs) goes on by itself no more. Until then a step that is only slow is not thrown away.
STUCK_SECONDS = 2 * NO_PROGRESS_SECONDS
LATE_SECONDS = 1.0  # a timer that rings so late tells of this process, not of the engine


class StepsOwed:
    """Since when a step is owed. Pure: moments are arguments, on one monotonic clock.

    Attributes:
        since_seconds: None where nothing is owed; it may lie ahead, when a heartbeat is due.
    """

    def __init__(self, heartbeat_interval_seconds: float) -> None:
        self._interval_seconds = heartbeat_interval_seconds
        self.since_seconds: float | None = None

    def stepped(self, now_seconds: float, *, is_busy: bool) -> None:
        """A step ended, or an idle engine answered; `is_busy`: there are requests left."""
        if is_busy:
            self.since_seconds = now_seconds
        else:
            self.since_seconds = now_seconds + self._interval_seconds if self._interval_seconds > 0 else None

    def work_came(self, now_seconds: float) -> None:
        """A request was handed over."""
        self.since_seconds = now_seconds if self.since_seconds is None else min(self.since_seconds, now_seconds)

    def heartbeats_changed(self, interval_seconds: float, now_seconds: float, *, is_busy: bool) -> None:
        """0 switches them off. An idle engine counts anew."""
        self._interval_seconds = interval_seconds
        if not is_busy:
            self.stepped(now_seconds, is_busy=False)

    def silent_seconds(self, now_seconds: float) -> float:
        """How long a step has been owed; 0 while none is."""
        return 0.0 if self.since_seconds is None else max(0.0, now_seconds - self.since_seconds)


class ProgressWatch:
    """Watches one engine after another, on the event loop. One timer, which a step does not touch: it looks again."""

    def __init__(
        self,
        limit_seconds: float,
        stuck_seconds: float,
        heartbeat_interval_seconds: float,
        *,
        on_silence: Callable[[], None],
        on_life: Callable[[], None],
        on_stuck: Callable[[], None],
    ) -> None:
        self.limit_seconds = limit_seconds
        self.stuck_seconds = stuck_seconds
        self._owed = StepsOwed(heartbeat_interval_seconds)
        self._on_silence = on_silence
        self._on_recovered = on_life
        self._on_stuck = on_stuck
        self._timer: asyncio.TimerHandle | None = None
        self._watching = False
        self._silent = False

    def begin(self) -> None:
        """An engine is Ready."""
        self._watching, self._silent = True, False
        self.stepped(is_busy=False)

    def end(self) -> None:
        """There is no engine to watch."""
        self._watching = self._silent = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stepped(self, *, is_busy: bool) -> None:
        """See `StepsOwed.stepped`. When it is heard counts, not when it was sent: this process may have slept."""
        self._owed.stepped(time.monotonic(), is_busy=is_busy)
        self._wind()
        if self._silent:
            self._silent = False
            self._wind(anew=True)
            self._on_recovered()

    def work_came(self) -> None:
        """A request was handed over."""
        self._owed.work_came(time.monotonic())
        self._wind(anew=True)

    def heartbeats_changed(self, interval_seconds: float, *, is_busy: bool) -> None:
        """See `StepsOwed.heartbeats_changed`."""
        self._owed.heartbeats_changed(interval_seconds, time.monotonic(), is_busy=is_busy)
        self._wind()

    def _wind(self, *, anew: bool = False) -> None:
        """Have a timer, where a step is owed. One that rings too early winds itself again; too late it must not."""
        since_seconds = self._owed.since_seconds
        if not self._watching or since_seconds is None or self._silent or (self._timer is not None and not anew):
            return
        due_in_seconds = max(0.0, since_seconds + self.limit_seconds - time.monotonic())
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + due_in_seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(due_in_seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._owed.silent_seconds(time.monotonic()) < self.limit_seconds:
            self._wind()
        elif not self._silent:
            self._silent = True
            self._give_time()
            self._on_silence()

    def _give_time(self) -> None:
        """From the moment that the silence was noticed: this process may have slept, and the engine with it."""
        left_seconds = max(0.0, self.stuck_seconds - self.limit_seconds)
        self._timer = asyncio.get_running_loop().call_later(left_seconds, self._look_again)

    def _look_again(self) -> None:
        timer, self._timer = self._timer, None
        if not self._silent:
            self._wind()
        elif timer is not None and asyncio.get_running_loop().time() - timer.when() > LATE_SECONDS:
            self._give_time()
        else:
            self._on_stuck()
