"""The engine as the HTTP process sees it: generations in, tokens out, and what happens when it dies.

    submit(request, mailbox) ──Submit──▶ engine ──StepDone──▶ mailbox.put(token)
    abort(request_id)        ──Abort───▶

Everything here runs on the event loop. A death fails every running request at once with a clear error. An engine that
had served before is started again by `restart_policy`; one that never became Ready is not, because what stopped it (a
broken checkpoint, too little memory) would stop it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import EngineStats, Request
from millstream_runtime.engine_process.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Loaded,
    ModelLimits,
    PhaseEntered,
    Ready,
    Refused,
    SetHeartbeatInterval,
    StepDone,
    StepThreads,
    Submit,
    WeightsRead,
)
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.server.engine.output_queue import Mailbox
from millstream_runtime.server.engine.restart_policy import RESTART_DELAYS_SECONDS, restart_delay_seconds
from millstream_runtime.server.engine.watchdog import NO_PROGRESS_SECONDS, STUCK_SECONDS, ProgressWatch

# What may pass when the engine is started anew. The others are about files and flags, which stay as they are.
PASSING = (FailureReason.RUNTIME_CRASHED, FailureReason.OUT_OF_MEMORY)

OnEvent = Callable[[Event], None]
OnEnd = Callable[[RuntimeFailure], None]  # after the last event; why, as far as it can be seen from outside


class EngineConnection(Protocol):
    """A way to one engine that runs somewhere else: a process, or in tests a thread."""

    def send(self, command: Command) -> None:
        """Never blocks; after the engine's end it does nothing."""

    async def stop(self, timeout_seconds: float) -> bool:
        """End the engine after its current step; False when it had to be killed."""

    def kill(self) -> None:
        """End it now, whatever it does; `on_end` comes as after any death. Does nothing where that cannot be done."""


class LaunchEngine(Protocol):
    """Starts an engine. Both callbacks are called on the event loop, `on_end` once and last."""

    def __call__(self, on_event: OnEvent, on_end: OnEnd) -> EngineConnection: ...


class EngineClient:
    """One engine after another; never more than one at a time."""

    def __init__(
        self,
        launch: LaunchEngine,
        ledger: BootLedger,
        *,
        on_failure: Callable[[RuntimeFailure], None],
        heartbeat_interval_seconds: float,
        restart_delays_seconds: Sequence[float] = RESTART_DELAYS_SECONDS,
        no_progress_seconds: float = NO_PROGRESS_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """`on_failure`: there will be no engine any more. `restart_delays_seconds`: () never restarts.
        `no_progress_seconds`, `stuck_seconds`: see `progress_watch`."""
        self._launch = launch
        self._ledger = ledger
        self._on_failure = on_failure
        self._restart_delays_seconds = restart_delays_seconds
        self._connection: EngineConnection | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._told: RuntimeFailure | None = None  # by the engine itself, on its way out
        self._deaths_at_seconds: list[float] = []
        self._restarting: asyncio.TimerHandle | None = None
        self._stopping = False
        self._last_step_at_seconds: float | None = None
        self._watch = ProgressWatch(
            no_progress_seconds,
            stuck_seconds,
            heartbeat_interval_seconds,
            on_silence=self._on_silence,
            on_life=self._on_recovered,
            on_stuck=self._on_stuck,
        )
        self.on_step: Callable[[EngineStats], None] = lambda stats: None
        self.on_ready: Callable[[], None] = lambda: ledger.enter(Phase.READY)
        self.heartbeat_interval_seconds = heartbeat_interval_seconds
        # Read by /metrics, /ready and requests.
        self.failure: RuntimeFailure | None = None  # why there is no engine now; None while one boots or serves
        self.is_ready = False
        self.given_up = False
        self.restarts_total = 0
        self.heartbeat_latency_seconds: float | None = None
        self.stats: EngineStats | None = None
        self.topology: Topology | None = None  # what connects several ranks
        self.model_limits: ModelLimits | None = None  # known once an engine has sized its KV cache
        self.memory: MemoryUse | None = None  # likewise
        self.threads: tuple[StepThreads, ...] = ()  # once one has warmed up

    def start(self) -> None:
        """Launch the first engine."""
        self._told = None
        self._connection = self._launch(self._on_event, self._on_end)
        self._connection.send(SetHeartbeatInterval(self.heartbeat_interval_seconds))  # it may have changed since boot

    @property
    def is_restarting(self) -> bool:
        """An engine has died, and the next is not Ready yet."""
        return bool(self._deaths_at_seconds) and not self.is_ready and not self.given_up

    @property
    def heartbeat_age_seconds(self) -> float | None:
        """Since the last completed step of any kind: load never looks like silence. None before the first."""
        return None if self._last_step_at_seconds is None else time.monotonic() - self._last_step_at_seconds

    def set_heartbeat_interval(self, seconds: float) -> None:
        """0 switches heartbeats off. An engine that is idle counts anew at once; a later one begins with it."""
        self.heartbeat_interval_seconds = seconds
        if self._connection is not None:
            self._connection.send(SetHeartbeatInterval(seconds))
            self._watch.heartbeats_changed(seconds, is_busy=bool(self._mailboxes))

    def submit(self, request: Request, mailbox: Mailbox) -> None:
        """Queue a generation; its tokens come to `mailbox`.

        Raises:
            RuntimeFailure: there is no engine that could take it.
        """
        if self._connection is None or not self.is_ready:
            raise self.failure or RuntimeFailure(FailureReason.RUNTIME_CRASHED, "The engine is not ready.")
        self._mailboxes[request.request_id] = mailbox
        self._connection.send(Submit(request))
        self._watch.work_came()

    def abort(self, request_id: str) -> None:
        """End a generation early and free its KV blocks; no word of it reaches the mailbox after this."""
        if self._mailboxes.pop(request_id, None) is not None and self._connection is not None:
            self._connection.send(Abort(request_id))

    def abort_all(self, failure: Exception) -> None:
        """End every generation with `failure`."""
        for request_id, mailbox in list(self._mailboxes.items()):
            mailbox.fail(failure)
            self.abort(request_id)

    async def stop(self, timeout_seconds: float) -> bool:
        """End the engine for good; False when it had to be killed. One that still loads is not waited for."""
        self._stopping = True
        self._watch.end()
        if self._restarting is not None:
            self._restarting.cancel()
        if self._connection is None:
            return True
        return await self._connection.stop(timeout_seconds if self.is_ready else 0.0)

    def give_up(self, failure: RuntimeFailure) -> None:
        """There will be no engine any more, or no use for one."""
        if not self.given_up:
            self.given_up = True
            self._lose(failure)
            self._ledger.enter(Phase.FAILED, failure.message)
            self._on_failure(failure)

    def _on_event(self, event: Event) -> None:
        match event:
            case StepDone():
                self._deliver(event)
            case PhaseEntered(phase, message):
                self._ledger.enter(phase, message)
            case WeightsRead(progress):
                self._ledger.read_weights(progress)
            case Loaded():
                self._on_loaded(event)
            case Ready(stats, at_seconds, warm_up_seconds, threads):
                self.threads = threads
                self.stats, self._last_step_at_seconds = stats, at_seconds
                self.heartbeat_latency_seconds = warm_up_seconds
                self.is_ready, self.failure = True, None
                self._watch.begin()
                self.on_ready()
            case Refused(request_id, message):
                mailbox = self._mailboxes.pop(request_id, None)
                if mailbox is not None:
                    mailbox.fail(RuntimeFailure(FailureReason.RUNTIME_CRASHED, message))
            case Failed():
                self._told = event.as_failure()
                self._fail_all(self._told)  # its process takes a moment to end; nobody waits for that

    def _on_loaded(self, loaded: Loaded) -> None:
        self.model_limits, self.topology, self.memory = loaded.limits, loaded.topology, loaded.memory
        if self.topology is not None:
            log.info("topology", **asdict(self.topology))
        if self.memory is not None:
            self._ledger.count_bytes(Phase.SIZING_KV_CACHE, self.memory.kv_cache_bytes)
            if self.memory.graphs_bytes:  # recorded at boot, in the time that WarmingUp counts
                self._ledger.count_bytes(Phase.WARMING_UP, self.memory.graphs_bytes)
            log.info("memory", **self.memory.measured())

    def _on_silence(self) -> None:
        if self._ledger.snapshot().phase is Phase.READY:
            self._ledger.enter(Phase.UNRESPONSIVE, f"{self._silence(self._watch.limit_seconds)}.")

    def _on_stuck(self) -> None:
        """What holds it up will not pass. Its death is handled like any other, and tells why it came."""
        if self._connection is not None:
            message = f"{self._silence(self._watch.stuck_seconds)}, so it was killed."
            log.error("engine_stuck", message=message)
            self._told = RuntimeFailure(FailureReason.RUNTIME_CRASHED, message)
            self._connection.kill()

    def _silence(self, seconds: float) -> str:
        work = "requests wait" if self._mailboxes else "a heartbeat is due"
        return f"The engine has completed no step for {seconds:g} s although {work}"

    def _on_recovered(self) -> None:
        if self._ledger.snapshot().phase is Phase.UNRESPONSIVE:
            self.on_ready()

    def _deliver(self, step: StepDone) -> None:
        got_on = self.stats is None or step.stats.steps_total != self.stats.steps_total
        self.stats, self._last_step_at_seconds = step.stats, step.at_seconds
        if step.heartbeat_seconds is not None:
            self.heartbeat_latency_seconds = step.heartbeat_seconds
        self.on_step(step.stats)
        for output in step.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue  # aborted while the step ran
            if output.finish_reason is not None:
                del self._mailboxes[output.request_id]
            mailbox.put(step.at_seconds, output)
        if got_on or not self._mailboxes:  # an idle engine that answers is alive; a busy one must compute
            self._watch.stepped(is_busy=bool(self._mailboxes))

    def _on_end(self, seen: RuntimeFailure) -> None:
        if self._stopping or self.given_up:
            return
        failure = self._told or seen
        was_ready = self.is_ready or bool(self._deaths_at_seconds)
        self._lose(failure)
        self._deaths_at_seconds.append(time.monotonic())
        draining = self._ledger.snapshot().phase is Phase.DRAINING
        delay_seconds = None
        if was_ready and failure.reason in PASSING:
            delay_seconds = restart_delay_seconds(self._deaths_at_seconds, self._restart_delays_seconds)
        if draining:
            log.error("engine_died", message=failure.message, restart="no: draining")
        elif delay_seconds is None:
            self.give_up(self._final(failure))
        else:
            self._restart_in(delay_seconds, failure)

    def _restart_in(self, delay_seconds: float, failure: RuntimeFailure) -> None:
        self.restarts_total += 1
        log.error("engine_died", message=failure.message, restart_in_seconds=delay_seconds)
        self._ledger.begin_again(f"{failure.message} A new engine is starting.")
        self._restarting = asyncio.get_running_loop().call_later(delay_seconds, self.start)

    def _final(self, failure: RuntimeFailure) -> RuntimeFailure:
        if not self.restarts_total:
            return failure
        times = "once" if self.restarts_total == 1 else f"{self.restarts_total} times"
        return RuntimeFailure(failure.reason, f"{failure.message} It had been started again {times} before.")

    def _lose(self, failure: RuntimeFailure) -> None:
        self.is_ready, self.failure = False, failure
        self._fail_all(failure)

    def _fail_all(self, failure: RuntimeFailure) -> None:
        self.is_ready, self.failure = False, failure
        self._watch.end()
        for mailbox in self._mailboxes.values():
            mailbox.fail(failure)
        self._mailboxes.clear()
