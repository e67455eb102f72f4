"""The engine's main loop: commands in through a queue, events out through `send`, one step after another.

    any thread: put(command) ──deque──▶ run(): engine.add_request / abort / step ──▶ send(StepDone(...))

It sleeps on a condition while there is no work. A heartbeat (a one-token generation) wakes it when it has been idle for
the configured time, so that caches, clocks and allocators stay warm and a broken engine is noticed before a user's
request. A heartbeat never runs together with other work, and its cost is reported separately from users' tokens.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from millstream_runtime.config import GovernorMode, RuntimeConfig
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.kernel_backends import KernelChoice, LinearChoice
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.out_of_memory import is_out_of_memory
from millstream_runtime.engine.request import EngineStats, Request, SamplingParams, TokenOutput
from millstream_runtime.engine.step_times import TimedStep
from millstream_runtime.engine_process.boot_events import BootEvents
from millstream_runtime.engine_process.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Load,
    Loaded,
    ModelLimits,
    Ready,
    Refused,
    SetHeartbeatInterval,
    SetSpeculationGovernor,
    SetTargetItl,
    StepDone,
    StepThreads,
    Stop,
    Submit,
)
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.processes.memory_remedy import MEMORY_REMEDY

HEARTBEAT_PROMPT = (0,)


class LoadedModelShape(Protocol):
    """The part of the model configuration that the loop reads."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


OnLost = Callable[[RuntimeFailure], None]


class ThreadReport(Protocol):
    """What the loop reads of `engine.device_policy.ThreadCounts`, which would import torch here."""

    @property
    def all_threads(self) -> int: ...
    @property
    def limits(self) -> tuple[tuple[int, int], ...]: ...


class EngineLike(Protocol):
    """The part of `engine.engine.Engine` that the loop uses."""

    @property
    def model_config(self) -> LoadedModelShape: ...
    @property
    def topology(self) -> Topology | None: ...
    @property
    def memory_use(self) -> MemoryUse: ...
    @property
    def linears(self) -> tuple[LinearChoice, ...]: ...
    @property
    def kernels(self) -> tuple[KernelChoice, ...]: ...
    @property
    def kernel_lookups(self) -> Mapping[str, int]: ...
    @property
    def threads(self) -> ThreadReport: ...
    @property
    def step_times(self) -> tuple[TimedStep, ...]: ...
    def when_lost(self, on_lost: OnLost) -> None: ...
    def close(self) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def set_target_itl(self, milliseconds: int | None) -> None: ...
    def set_speculation_governor(self, mode: GovernorMode) -> None: ...
    def step(self) -> Sequence[TokenOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def warm_up(self) -> None: ...


OnPhase = BootEvents
MakeEngine = Callable[[RuntimeConfig, OnPhase], EngineLike]


def load_engine(config: RuntimeConfig, on_phase: OnPhase) -> EngineLike:
    """Import torch and build the engine; takes seconds."""
    from millstream_runtime.engine.engine import Engine

    return Engine(config, on_phase, on_read=on_phase.weights_read)


class EngineLoop:
    """Runs one engine until `Stop`. Any thread may call `put`; one calls `run`, and `send` is called there."""

    def __init__(
        self,
        send: Callable[[Event], None],
        make_engine: MakeEngine = load_engine,
        on_lost: OnLost = lambda failure: None,
    ) -> None:
        """`on_lost`: called by any thread when a rank is gone. The next step fails with it, unless one is stuck."""
        self._send = send
        self._on_lost = on_lost
        self._make_engine = make_engine
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._heartbeat_interval_seconds = 0.0
        self._last_step_at_seconds = 0.0
        self._taken_requests = self._taken_tokens = 0
        self._heartbeats = 0
        self._heartbeat_id: str | None = None
        self._heartbeat_began_at_seconds = 0.0

    def put(self, command: Command) -> None:
        """Queue a command; it is applied before the next step."""
        with self._changed:
            self._commands.append(command)
            if isinstance(command, Stop):
                self._stopping = True
            self._changed.notify()

    def run(self, config: RuntimeConfig) -> bool:
        """Build the engine and serve. False after a failure, which was sent as `Failed`."""
        with contextlib.ExitStack() as stack:
            try:
                engine = self._boot(config, stack)
                while self._wait_for_work(engine):
                    self._step(engine)
            except BaseException as error:  # always report the failure
                failure = failure_of(error)
                self._send(Failed(failure.reason, failure.message))
                return False
        return True

    def _boot(self, config: RuntimeConfig, stack: contextlib.ExitStack) -> EngineLike:
        self._heartbeat_interval_seconds = config.heartbeat_interval_seconds
        engine = self._make_engine(config, BootEvents(self._send))
        stack.callback(engine.close)
        engine.when_lost(self._on_rank_lost)
        limits = ModelLimits(engine.model_config.max_model_len, engine.model_config.vocab_size)
        lookups = dict(engine.kernel_lookups)
        self._send(Loaded(limits, engine.topology, engine.memory_use, engine.kernels, lookups, engine.linears))
        began = time.monotonic()
        engine.warm_up()
        now = self._last_step_at_seconds = time.monotonic()
        self._send(Ready(engine.stats(), now, now - began, step_threads(engine.threads), engine.step_times))
        return engine

    def _on_rank_lost(self, failure: RuntimeFailure) -> None:
        self._on_lost(failure)
        with self._changed:
            self._changed.notify()

    def _wait_for_work(self, engine: EngineLike) -> bool:
        """Apply commands; block while idle. False once `Stop` has come."""
        with self._changed:
            while not (self._stopping or self._commands or engine.has_work()):
                if not self._changed.wait(self._seconds_to_heartbeat()):
                    self._begin_heartbeat(engine)
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            self._apply(engine, command)
        return True

    def _apply(self, engine: EngineLike, command: Command) -> None:
        match command:
            case Submit(request):
                self._taken_requests += 1
                self._taken_tokens += len(request.prompt_token_ids)
                try:
                    engine.add_request(request)
                except ValueError as error:
                    self._send(Refused(request.request_id, f"The engine refused the request: {error}"))
            case Abort(request_id):
                engine.abort(request_id)
            case SetHeartbeatInterval(seconds):
                self._heartbeat_interval_seconds = seconds
            case SetTargetItl(milliseconds):
                engine.set_target_itl(milliseconds)
            case SetSpeculationGovernor(mode):
                engine.set_speculation_governor(mode)
            case Load() | Stop():  # Load came before the loop started, and Stop ends it
                pass

    def _step(self, engine: EngineLike) -> None:
        if not engine.has_work():  # the commands were aborts or settings
            self._send_step(engine, (), self._last_step_at_seconds)
            return
        outputs = engine.step()
        now = self._last_step_at_seconds = time.monotonic()
        heartbeat_seconds = None
        if self._heartbeat_id is not None:
            user_outputs = [output for output in outputs if output.request_id != self._heartbeat_id]
            if len(user_outputs) < len(outputs):  # the heartbeat generates one token
                heartbeat_seconds = now - self._heartbeat_began_at_seconds
                self._heartbeat_id = None
            outputs = user_outputs
        self._send_step(engine, outputs, now, heartbeat_seconds)

    def _send_step(
        self,
        engine: EngineLike,
        outputs: Sequence[TokenOutput],
        at_seconds: float,
        heartbeat_seconds: float | None = None,
    ) -> None:
        taken = self._taken_requests, self._taken_tokens
        self._send(StepDone(tuple(outputs), engine.stats(), at_seconds, heartbeat_seconds, *taken))

    def _seconds_to_heartbeat(self) -> float | None:
        if self._heartbeat_interval_seconds <= 0:
            return None
        return max(0.0, self._last_step_at_seconds + self._heartbeat_interval_seconds - time.monotonic())

    def _begin_heartbeat(self, engine: EngineLike) -> None:
        self._heartbeats += 1
        self._heartbeat_id = f"heartbeat-{self._heartbeats}"
        self._heartbeat_began_at_seconds = time.monotonic()
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(self._heartbeat_id, HEARTBEAT_PROMPT, sampling, is_heartbeat=True))


def step_threads(threads: ThreadReport) -> tuple[StepThreads, ...]:
    """Convert to messages: the limits in order, then the number of threads beyond them."""
    limits = [StepThreads(most_tokens, count) for most_tokens, count in threads.limits]
    return (*limits, StepThreads(None, threads.all_threads))


def failure_of(error: BaseException) -> RuntimeFailure:
    """Return the failure to report; for a bug an internal error whose traceback is logged."""
    if isinstance(error, RuntimeFailure):
        return error
    if is_out_of_memory(error):
        return RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"The engine ran out of memory; {MEMORY_REMEDY}.",
        )
    log.error("engine_crashed", traceback="".join(traceback.format_exception(error)))
    return RuntimeFailure(
        FailureReason.RUNTIME_CRASHED, f"The engine stopped on an internal error ({type(error).__name__}); see the log."
    )
