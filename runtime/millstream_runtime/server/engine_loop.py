"""The engine's own thread: commands in by a queue, tokens out by one wake-up of the event loop a step.

    event loop                              engine thread
    submit(request, mailbox) --deque-->     engine.add_request
    abort(request_id)        --deque-->     engine.abort
    mailbox.put(token) <--call_soon_threadsafe, once a step--  engine.step()

The thread sleeps on a condition while there is nothing to do; a heartbeat (a one-token generation) wakes it when it
has been idle for the configured time, so that caches, clocks and allocators stay warm and a broken engine shows
before a user meets it. Mailboxes live on the event loop only, so they need no lock.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.request import EngineStats, Request, SamplingParams, TokenOutput
from millstream_runtime.errors import Reason, RuntimeFailure
from millstream_runtime.server.logs import log

HEARTBEAT_PROMPT = (0,)


class ModelLimits(Protocol):
    """What the server must know of the loaded model."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class EngineLike(Protocol):
    """What the loop needs of `millstream_runtime.engine`."""

    @property
    def model_config(self) -> ModelLimits: ...
    @property
    def topology(self) -> Topology | None: ...
    def when_lost(self, on_lost: Callable[[RuntimeFailure], None]) -> None: ...
    def close(self) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> Sequence[TokenOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def warm_up(self) -> None: ...


OnPhase = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step brought: user tokens only, with the moment they left the engine (`time.monotonic()`)."""

    outputs: Sequence[TokenOutput]
    stats: EngineStats
    at_seconds: float


class Mailbox:
    """Tokens on their way to the asyncio task of one HTTP request, which may await several generations at once."""

    def __init__(self) -> None:
        self._arrived: list[tuple[float, TokenOutput]] = []
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    def put(self, at_seconds: float, output: TokenOutput) -> None:
        self._arrived.append((at_seconds, output))
        self._wake.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._wake.set()

    async def take(self) -> list[tuple[float, TokenOutput]]:
        """Everything that arrived since the last call, at least one token.

        Raises:
            Exception: what `fail` was given: the engine stopped, or the server gave this request up.
        """
        await self._wake.wait()
        if self._failure is not None:
            raise self._failure
        self._wake.clear()
        arrived, self._arrived = self._arrived, []
        return arrived


class EngineLoop:
    """Runs one engine. `submit` and `abort` are called on the event loop; everything else says so."""

    def __init__(
        self,
        make_engine: Callable[[OnPhase], EngineLike],
        ledger: BootLedger,
        *,
        heartbeat_interval_seconds: float,
        on_failure: Callable[[RuntimeFailure], None],
    ) -> None:
        self._make_engine = make_engine
        self._ledger = ledger
        self._heartbeat_interval_seconds = heartbeat_interval_seconds
        self._on_failure = on_failure
        self._commands: deque[Callable[[EngineLike], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._failure: RuntimeFailure | None = None
        self._last_step_at_seconds: float | None = None
        self._heartbeats = 0
        self._heartbeat_id: str | None = None
        self._heartbeat_began_at_seconds = 0.0
        # Read by /metrics and by requests; each is replaced whole, so no lock is needed.
        self.on_step: Callable[[EngineStats], None] = lambda stats: None  # called on the event loop
        self.heartbeat_latency_seconds: float | None = None
        self.stats: EngineStats | None = None
        self.model_limits: ModelLimits | None = None  # known once the engine has sized its KV cache
        self.topology: Topology | None = None  # of several ranks, known from then on

    # On the event loop -------------------------------------------------------------------------------------------

    def start(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the engine failed or was stopped."""
        return self._failure is None and self._thread.is_alive()

    @property
    def heartbeat_age_seconds(self) -> float | None:
        """Since the last completed step of any kind: load never looks like silence. None before the first."""
        return None if self._last_step_at_seconds is None else time.monotonic() - self._last_step_at_seconds

    def submit(self, request: Request, mailbox: Mailbox) -> None:
        """Queue a generation; its tokens come to `mailbox`.

        Raises:
            RuntimeFailure: the engine has failed.
        """
        if self._failure is not None:
            raise self._failure
        self._mailboxes[request.request_id] = mailbox
        self._command(lambda engine: self._add(engine, request))

    def abort(self, request_id: str) -> None:
        """End a generation early and free its KV blocks; no word of it reaches the mailbox after this."""
        if self._mailboxes.pop(request_id, None) is not None:
            self._command(lambda engine: engine.abort(request_id))

    def abort_all(self, failure: Exception) -> None:
        """End every generation with `failure`."""
        for request_id, mailbox in list(self._mailboxes.items()):
            mailbox.fail(failure)
            self.abort(request_id)

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after its current step; False when it did not end in time (it is a daemon)."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _command(self, command: Callable[[EngineLike], None]) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _deliver(self, report: StepReport) -> None:
        self.stats = report.stats
        self.on_step(report.stats)
        for output in report.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue  # aborted while the step ran
            if output.finish_reason is not None:
                del self._mailboxes[output.request_id]
            mailbox.put(report.at_seconds, output)

    def _deliver_refusal(self, request_id: str, failure: RuntimeFailure) -> None:
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            mailbox.fail(failure)

    def _deliver_failure(self, failure: RuntimeFailure) -> None:
        if self._failure is not None:
            return  # a lost rank tells of itself, and the step that missed it fails as well
        self._failure = failure
        self._ledger.enter(Phase.FAILED, failure.message)
        for mailbox in self._mailboxes.values():
            mailbox.fail(failure)
        self._mailboxes.clear()
        self._on_failure(failure)

    # In the engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._boot()
            try:
                while self._wait_for_work(engine):
                    self._step(engine)
            finally:
                engine.close()
        except BaseException as error:  # the thread must never end in silence
            self._post(self._deliver_failure, as_failure(error))

    def _boot(self) -> EngineLike:
        engine = self._make_engine(self._ledger.enter)
        self.model_limits = engine.model_config
        self.topology = engine.topology
        if self.topology is not None:
            log.info("topology", **asdict(self.topology))
        engine.when_lost(lambda failure: self._post(self._deliver_failure, failure))
        began = time.monotonic()
        engine.warm_up()
        self._last_step_at_seconds = time.monotonic()
        self.heartbeat_latency_seconds = self._last_step_at_seconds - began
        self.stats = engine.stats()
        self._ledger.enter(Phase.READY)
        return engine

    def _wait_for_work(self, engine: EngineLike) -> bool:
        """Apply commands; block while idle. False when the thread should end."""
        with self._changed:
            while not (self._stopping or self._commands or engine.has_work()):
                if not self._changed.wait(self._seconds_to_heartbeat()):
                    self._begin_heartbeat(engine)
            if self._stopping:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command(engine)
        return True

    def _step(self, engine: EngineLike) -> None:
        if not engine.has_work():  # every command was an abort
            self._post(self._deliver, StepReport((), engine.stats(), time.monotonic()))
            return
        outputs = engine.step()
        now = self._last_step_at_seconds = time.monotonic()
        if self._heartbeat_id is not None:
            outputs = self._without_heartbeat(outputs, now)
        self._post(self._deliver, StepReport(outputs, engine.stats(), now))

    def _add(self, engine: EngineLike, request: Request) -> None:
        try:
            engine.add_request(request)
        except ValueError as error:  # this request alone is at fault
            failure = RuntimeFailure(Reason.RUNTIME_CRASHED, f"The engine refused the request: {error}")
            self._post(self._deliver_refusal, request.request_id, failure)

    def _seconds_to_heartbeat(self) -> float | None:
        if self._heartbeat_interval_seconds <= 0 or self._last_step_at_seconds is None:
            return None
        return max(0.0, self._last_step_at_seconds + self._heartbeat_interval_seconds - time.monotonic())

    def _begin_heartbeat(self, engine: EngineLike) -> None:
        self._heartbeats += 1
        self._heartbeat_id = f"heartbeat-{self._heartbeats}"
        self._heartbeat_began_at_seconds = time.monotonic()
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(self._heartbeat_id, HEARTBEAT_PROMPT, sampling, is_heartbeat=True))

    def _without_heartbeat(self, outputs: Sequence[TokenOutput], now: float) -> Sequence[TokenOutput]:
        beats = [output for output in outputs if output.request_id == self._heartbeat_id]
        if any(beat.finish_reason is not None for beat in beats):
            self.heartbeat_latency_seconds = now - self._heartbeat_began_at_seconds
            self._heartbeat_id = None
        return [output for output in outputs if output not in beats]

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._event_loop is not None  # noqa: S101 - set by start()
        try:
            self._event_loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the event loop has closed: the process is on its way out
            self._stopping = True


def as_failure(error: BaseException) -> RuntimeFailure:
    """A RuntimeFailure as it is; memory exhaustion by name; anything else is a bug, whose traceback is logged."""
    if isinstance(error, RuntimeFailure):
        return error
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own class
        return RuntimeFailure(
            Reason.OUT_OF_MEMORY,
            "The engine ran out of memory; give the pod more, or lower --max-num-seqs, --max-num-batched-tokens "
            "or --kv-cache-memory-bytes.",
        )
    log.error("engine_crashed", traceback="".join(traceback.format_exception(error)))
    return RuntimeFailure(
        Reason.RUNTIME_CRASHED, f"The engine stopped on an internal error ({type(error).__name__}); see the log."
    )
