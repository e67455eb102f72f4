"""The engine as the HTTP process sees it: generations in, tokens out, and restarts after a crash.

    submit(request, queue) ──Submit──▶ engine ──StepDone──▶ queue.put(token)
    abort(request_id)      ──Abort───▶

Everything here runs on the event loop. When the engine dies, every running request fails at once with a clear error. An
engine that had been Ready is restarted by `restart_policy`; one that never became Ready is not, because what stopped it
(a broken checkpoint, too little memory) would stop it again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.config import GovernorMode
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.kernel_backends import KernelChoice, LinearChoice
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import EngineStats, Request
from millstream_runtime.engine.step_times import TimedStep
from millstream_runtime.engine_process.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Loaded,
    ModelLimits,
    PhaseEntered,
    PromptLogprobs,
    Ready,
    Refused,
    SetHeartbeatInterval,
    SetSpeculationGovernor,
    SetTargetItl,
    StepDone,
    StepThreads,
    Submit,
    WeightsRead,
)
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.server.engine.output_queue import OutputQueue
from millstream_runtime.server.engine.restart_policy import RESTART_DELAYS_SECONDS, restart_delay_seconds
from millstream_runtime.server.engine.watchdog import NO_PROGRESS_SECONDS, STUCK_SECONDS, EngineWatchdog

# Failures that a restart may cure. The others are about files and flags, which stay as they are.
RETRYABLE = (FailureReason.RUNTIME_CRASHED, FailureReason.OUT_OF_MEMORY)

OnEvent = Callable[[Event], None]
OnEnd = Callable[[RuntimeFailure], None]  # after the last event; the cause, as far as it is visible from outside


class RequestRefused(RuntimeFailure):
    """The engine refused one request, and serves the others."""


class EngineConnection(Protocol):
    """The connection to one engine that runs in another process, or in tests in a thread."""

    def send(self, command: Command) -> None:
        """Send a command. Never blocks; does nothing after the engine has ended."""

    async def stop(self, timeout_seconds: float) -> bool:
        """End the engine after its current step; False when it had to be killed."""

    def kill(self) -> None:
        """Kill it now; `on_end` follows as after any exit. Does nothing where that is impossible."""


class EngineLauncher(Protocol):
    """Starts an engine. Calls both callbacks on the event loop, `on_end` once and last."""

    def __call__(self, on_event: OnEvent, on_end: OnEnd) -> EngineConnection: ...


class EngineClient:
    """Runs one engine at a time, and the next one after a crash."""

    def __init__(
        self,
        launch: EngineLauncher,
        ledger: BootLedger,
        *,
        on_failure: Callable[[RuntimeFailure], None],
        heartbeat_interval_seconds: float,
        restart_delays_seconds: Sequence[float] = RESTART_DELAYS_SECONDS,
        no_progress_seconds: float = NO_PROGRESS_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """`on_failure`: called when no engine will be started again. `restart_delays_seconds`: () never restarts.
        `no_progress_seconds`, `stuck_seconds`: see `watchdog`."""
        self._launch = launch
        self._ledger = ledger
        self._on_failure = on_failure
        self._restart_delays_seconds = restart_delays_seconds
        self._connection: EngineConnection | None = None
        self._queues: dict[str, OutputQueue] = {}
        self._reported_failure: RuntimeFailure | None = None  # by the engine itself, before it ended
        self._crashes_at_seconds: list[float] = []
        self._restarting: asyncio.TimerHandle | None = None
        self._stopping = False
        self._last_step_at_seconds: float | None = None
        self._watchdog = EngineWatchdog(
            no_progress_seconds,
            stuck_seconds,
            heartbeat_interval_seconds,
            on_stalled=self._on_stalled,
            on_recovered=self._on_recovered,
            on_stuck=self._on_stuck,
        )
        self.on_step: Callable[[EngineStats], None] = lambda stats: None
        self.on_start: Callable[[str], None] = lambda boot_id: None
        self.on_ready: Callable[[], None] = lambda: ledger.enter(Phase.READY)
        self.heartbeat_interval_seconds = heartbeat_interval_seconds
        self._target_itl_milliseconds: int | None = None  # None: what the engine is started with
        self._speculation_governor: GovernorMode | None = None  # likewise
        self._sent_requests = self._sent_tokens = 0  # to this engine, with the tokens of their prompts
        # Read by /metrics, /ready, /load and requests.
        self.boot_id = ""  # of the engine that was started last: with it a KV cache begins
        self.untaken_requests = self.untaken_tokens = 0  # sent, and not part of `stats` yet
        self.failure: RuntimeFailure | None = None  # why there is no engine now; None while one boots or serves
        self.is_ready = False
        self.given_up = False
        self.restarts_total = 0
        self.heartbeat_latency_seconds: float | None = None
        self.stats: EngineStats | None = None
        self.kernel_lookups: dict[str, int] = {}  # see `messages.Loaded`
        self.kernels: tuple[KernelChoice, ...] = ()  # what computes the parts of the model, once it is loaded
        self.linears: tuple[LinearChoice, ...] = ()  # what computes its quantized layers
        self.topology: Topology | None = None  # the links between ranks; None for one rank
        self.model_limits: ModelLimits | None = None  # known once an engine has sized its KV cache
        self.memory: MemoryUse | None = None  # likewise
        self.threads: tuple[StepThreads, ...] = ()  # once one has warmed up
        self.step_times: tuple[TimedStep, ...] = ()  # likewise

    def start(self) -> None:
        """Launch the first engine."""
        self._reported_failure = None
        self.boot_id = secrets.token_hex(8)
        self._sent_requests = self._sent_tokens = self.untaken_requests = self.untaken_tokens = 0
        self.on_start(self.boot_id)
        self._connection = self._launch(self._on_event, self._on_end)
        self._connection.send(
            SetHeartbeatInterval(self.heartbeat_interval_seconds)
        )  # it may have changed since the process was started
        if self._target_itl_milliseconds is not None:
            self._connection.send(SetTargetItl(self._target_itl_milliseconds))
        if self._speculation_governor is not None:
            self._connection.send(SetSpeculationGovernor(self._speculation_governor))

    @property
    def is_restarting(self) -> bool:
        """Whether an engine has crashed and the next is not Ready yet."""
        return bool(self._crashes_at_seconds) and not self.is_ready and not self.given_up

    @property
    def heartbeat_age_seconds(self) -> float | None:
        """Since the last completed step of any kind: load never looks like a stall. None before the first."""
        return None if self._last_step_at_seconds is None else time.monotonic() - self._last_step_at_seconds

    def set_heartbeat_interval(self, seconds: float) -> None:
        """Apply a new interval; 0 switches heartbeats off. A running engine takes it over, later ones start with it."""
        self.heartbeat_interval_seconds = seconds
        if self._connection is not None:
            self._connection.send(SetHeartbeatInterval(seconds))
            self._watchdog.heartbeat_interval_changed(seconds, is_busy=bool(self._queues))

    def set_target_itl(self, milliseconds: int | None) -> None:
        """Apply a new target of the inter-token latency; None: what the engine was started with. Later ones too."""
        if milliseconds != self._target_itl_milliseconds and self._connection is not None:
            self._connection.send(SetTargetItl(milliseconds))
        self._target_itl_milliseconds = milliseconds

    def set_speculation_governor(self, mode: GovernorMode) -> None:
        """Apply a new mode. A running engine takes it over, later ones start with it."""
        if mode != self._speculation_governor and self._connection is not None:
            self._connection.send(SetSpeculationGovernor(mode))
        self._speculation_governor = mode

    def submit(self, request: Request, queue: OutputQueue) -> None:
        """Queue a generation; its tokens go to `queue`.

        Raises:
            RuntimeFailure: no engine is ready.
        """
        if self._connection is None or not self.is_ready:
            raise self.failure or RuntimeFailure(FailureReason.RUNTIME_CRASHED, "The engine is not ready.")
        self._queues[request.request_id] = queue
        self._connection.send(Submit(request))
        num_tokens = len(request.prompt_token_ids)
        self._sent_requests += 1
        self.untaken_requests += 1
        self._sent_tokens += num_tokens
        self.untaken_tokens += num_tokens
        self._watchdog.request_submitted()

    def abort(self, request_id: str) -> None:
        """End a generation early and free its KV blocks; nothing reaches its queue after this."""
        if self._remove(request_id) is not None and self._connection is not None:
            self._connection.send(Abort(request_id))

    def abort_all(self, failure: Exception) -> None:
        """End every generation with `failure`."""
        for request_id, queue in list(self._queues.items()):
            queue.fail(failure)
            self.abort(request_id)

    async def stop(self, timeout_seconds: float) -> bool:
        """End the engine for good; False when it had to be killed. An engine that still loads is killed at once."""
        self._stopping = True
        self._watchdog.stop()
        if self._restarting is not None:
            self._restarting.cancel()
        if self._connection is None:
            return True
        return await self._connection.stop(timeout_seconds if self.is_ready else 0.0)

    def give_up(self, failure: RuntimeFailure) -> None:
        """Enter Failed: no engine is started again."""
        if not self.given_up:
            self.given_up = True
            self._fail_all(failure)
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
            case Ready(stats, at_seconds, warm_up_seconds, threads, step_times):
                self.threads, self.step_times = threads, step_times
                self.stats, self._last_step_at_seconds = stats, at_seconds
                self.heartbeat_latency_seconds = warm_up_seconds
                self.is_ready, self.failure = True, None
                self._watchdog.start()
                self.on_ready()
            case Refused(request_id, message):
                queue = self._remove(request_id)
                if queue is not None:
                    queue.fail(RequestRefused(FailureReason.RUNTIME_CRASHED, message))
            case PromptLogprobs():
                raise TypeError("a connection puts the parts of a prompt back into their step")
            case Failed():
                self._reported_failure = event.failure()
                self._fail_all(self._reported_failure)  # at once: its process takes a moment to end

    def _on_loaded(self, loaded: Loaded) -> None:
        self.model_limits, self.topology, self.memory = loaded.limits, loaded.topology, loaded.memory
        self.kernels, self.kernel_lookups = loaded.kernels, loaded.kernel_lookups
        self.linears = loaded.linears
        if self.topology is not None:
            log.info("topology", **asdict(self.topology))
        if self.memory is not None:
            self._ledger.count_bytes(Phase.SIZING_KV_CACHE, self.memory.kv_cache_bytes)
            if self.memory.graphs_bytes:  # recorded at boot, in the time that WarmingUp counts
                self._ledger.count_bytes(Phase.WARMING_UP, self.memory.graphs_bytes)
            log.info("memory", **self.memory.measured())

    def _on_stalled(self) -> None:
        if self._ledger.snapshot().phase is Phase.READY:
            self._ledger.enter(Phase.UNRESPONSIVE, f"{self._stall_message(self._watchdog.limit_seconds)}.")

    def _on_stuck(self) -> None:
        """Kill an engine that will not recover. Its end is handled like any other crash, with this message."""
        if self._connection is not None:
            message = f"{self._stall_message(self._watchdog.stuck_seconds)}, so it was killed."
            log.error("engine_stuck", message=message)
            self._reported_failure = RuntimeFailure(FailureReason.RUNTIME_CRASHED, message)
            self._connection.kill()

    def _stall_message(self, seconds: float) -> str:
        work = "requests wait" if self._queues else "a heartbeat is due"
        return f"The engine has completed no step for {seconds:g} s although {work}"

    def _on_recovered(self) -> None:
        if self._ledger.snapshot().phase is Phase.UNRESPONSIVE:
            self.on_ready()

    def _deliver(self, step: StepDone) -> None:
        progressed = self.stats is None or step.stats.steps_total != self.stats.steps_total
        self.stats, self._last_step_at_seconds = step.stats, step.at_seconds
        if step.heartbeat_seconds is not None:
            self.heartbeat_latency_seconds = step.heartbeat_seconds
        self.untaken_requests = self._sent_requests - step.taken_requests
        self.untaken_tokens = self._sent_tokens - step.taken_tokens
        self.on_step(step.stats)
        for output in step.outputs:
            queue = self._queues.get(output.request_id)
            if queue is None:
                continue  # aborted while the step ran
            if output.finish_reason is not None:
                self._remove(output.request_id)
            queue.put(step.at_seconds, output)
        if progressed or not self._queues:  # an idle engine that answers is alive; a busy one must complete steps
            self._watchdog.step_completed(is_busy=bool(self._queues))

    def _on_end(self, observed: RuntimeFailure) -> None:
        if self._stopping or self.given_up:
            return
        failure = self._reported_failure or observed
        was_ready = self.is_ready or bool(self._crashes_at_seconds)
        self._fail_all(failure)
        self._crashes_at_seconds.append(time.monotonic())
        draining = self._ledger.snapshot().phase is Phase.DRAINING
        delay_seconds = None
        if was_ready and failure.reason in RETRYABLE:
            delay_seconds = restart_delay_seconds(self._crashes_at_seconds, self._restart_delays_seconds)
        if draining:
            log.error("engine_died", message=failure.message, restart="no: draining")
        elif delay_seconds is None:
            self.give_up(self._final(failure))
        else:
            self._restart_in(delay_seconds, failure)

    def _restart_in(self, delay_seconds: float, failure: RuntimeFailure) -> None:
        self.restarts_total += 1
        log.error("engine_died", message=failure.message, restart_in_seconds=delay_seconds)
        self._ledger.restart(f"{failure.message} A new engine is starting.")
        self._restarting = asyncio.get_running_loop().call_later(delay_seconds, self.start)

    def _final(self, failure: RuntimeFailure) -> RuntimeFailure:
        if not self.restarts_total:
            return failure
        times = "once" if self.restarts_total == 1 else f"{self.restarts_total} times"
        return RuntimeFailure(failure.reason, f"{failure.message} It had been started again {times} before.")

    def _fail_all(self, failure: RuntimeFailure) -> None:
        self.is_ready, self.failure = False, failure
        self._watchdog.stop()
        for request_id, queue in list(self._queues.items()):
            queue.fail(failure)
            self._remove(request_id)

    def _remove(self, request_id: str) -> OutputQueue | None:
        """Forget a generation that the engine is done with; None: it was no longer known."""
        queue = self._queues.pop(request_id, None)
        if queue is not None:
            queue.generation_ended()
        return queue
