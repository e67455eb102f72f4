"""One server, one model: socket, engine process, HTTP, signals, drain, exit.

    bind ── start engine process (import torch, load, warm up) ────────────► Ready ─┐
      └──── import FastAPI, listen: /ready shows the phase from the first moment ───┴─► serve
    SIGTERM: /ready 503 at once ─► serve until no new request comes ─► refuse with 503 ─► last answer sent ─► exit 0

The socket is bound before anything heavy is imported, so a busy port fails in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import uvicorn

from millstream_runtime.boot import SERVING_PHASES, BootLedger, BootSnapshot, Phase
from millstream_runtime.config import LiveConfig, RuntimeConfig
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.logs import log, log_level, set_log_level
from millstream_runtime.server.engine.client import EngineLauncher
from millstream_runtime.server.engine.restart_policy import RESTART_DELAYS_SECONDS
from millstream_runtime.server.engine.watchdog import NO_PROGRESS_SECONDS, STUCK_SECONDS
from millstream_runtime.server.http import limits
from millstream_runtime.server.http.api_errors import unavailable
from millstream_runtime.server.http.connection_limits import ConnectionLimits
from millstream_runtime.server.http.failure_log import keep_messages_out_of_the_log
from millstream_runtime.server.http.protocol import CappedHttpProtocol
from millstream_runtime.server.operations.drain import DrainCutoff
from millstream_runtime.server.operations.live_config import LiveConfigFile
from millstream_runtime.server.routes import build_app
from millstream_runtime.server.service import Service

KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they close first and see no reset
ENGINE_STOP_TIMEOUT_SECONDS = 5.0


class ModelServer:
    """Created on the event loop's thread; `run()` ends when the server has drained or failed."""

    def __init__(
        self,
        config: RuntimeConfig,
        listener: socket.socket,
        ledger: BootLedger,
        launch_engine: EngineLauncher,
        *,
        drain_grace_seconds: float = limits.DRAIN_GRACE_SECONDS,
        restart_delays_seconds: Sequence[float] = RESTART_DELAYS_SECONDS,
        no_progress_seconds: float = NO_PROGRESS_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        live_config: Path | None = None,
        limits_of_connections: ConnectionLimits | None = None,
    ) -> None:
        """`restart_delays_seconds`, `no_progress_seconds`, `stuck_seconds`: see `EngineClient`. `live_config`: the file
        of the live half, watched while this runs; None: the values of `config` stay. `limits_of_connections`: see
        `Service`."""
        self._config = config
        self._listener = listener
        self._ledger = ledger
        self._drain_grace_seconds = drain_grace_seconds
        self._draining: asyncio.Task[None] | None = None
        self._failure: RuntimeFailure | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # set by `run`
        ledger.subscribe(_log_phase)
        self.service = Service(
            config,
            ledger,
            launch_engine,
            on_failure=self._on_failure,
            restart_delays_seconds=restart_delays_seconds,
            no_progress_seconds=no_progress_seconds,
            stuck_seconds=stuck_seconds,
            limits_of_connections=limits_of_connections,
        )
        self._app = build_app(self.service)
        self._app.allow(config.allowed_origins)
        self.live_config = self._watch_live_config(live_config) if live_config is not None else None

    async def run(self) -> None:
        """Serve until drained.

        Raises:
            RuntimeFailure: the engine could not load, or stopped.
        """
        loop = self._loop = asyncio.get_running_loop()
        keep_messages_out_of_the_log()
        self._http = _Http(
            uvicorn.Config(
                self._app,
                http=partial(CappedHttpProtocol, table=self.service.connections),  # type: ignore[arg-type]
                log_config=None,
                log_level="error",  # its warnings are one per request that is no HTTP
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,  # nothing here depends on the client address or scheme
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=limits.FLUSH_TIMEOUT_SECONDS,
            )
        )
        if self.live_config is not None:
            self.live_config.start()
        self.service.start()
        with self._signals(loop):
            await self._http.serve([self._listener])
        if self.live_config is not None:
            self.live_config.stop()
        self.service.close()
        ended = await self.service.engine.stop(ENGINE_STOP_TIMEOUT_SECONDS)
        if self._failure is not None:
            raise self._failure
        log.info("stopped", engine_ended_by_itself=ended)

    def _watch_live_config(self, path: Path) -> LiveConfigFile:
        level_at_start = log_level()  # of the flag or the environment

        def apply(live: LiveConfig) -> None:
            self._on_loop(lambda: self.service.engine.set_heartbeat_interval(live.heartbeat_interval_seconds))
            self._on_loop(lambda: self.service.engine.set_target_itl(live.target_itl_milliseconds))
            self._on_loop(lambda: self.service.engine.set_speculation_governor(live.speculation_governor))
            self._on_loop(lambda: self._app.allow(live.allowed_origins))
            if (keys := self.service.api_keys) is not None:
                self._on_loop(lambda: keys.accept_probe(live.probe_key_digests))
            set_log_level(live.log_level or level_at_start)

        file = LiveConfigFile(path, apply, labels=self.service.metrics.labels)
        self.service.metrics.register(file)
        file.reload()  # before the engine is started, which begins with these values
        return file

    def _on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the event loop, which owns the engine; directly before the loop runs."""
        if self._loop is None:
            call()
            return
        with contextlib.suppress(RuntimeError):  # the loop has closed: there is no engine any more
            self._loop.call_soon_threadsafe(call)

    def begin_drain(self, grace_seconds: float | None = None) -> None:
        """Finish the running requests, then end `run()`. A second call has no effect."""
        if self._draining is None:
            grace = self._drain_grace_seconds if grace_seconds is None else grace_seconds
            self._draining = asyncio.get_running_loop().create_task(self._drain(grace))

    async def _drain(self, grace_seconds: float) -> None:
        if self._ledger.snapshot().phase in SERVING_PHASES:
            self._ledger.enter(Phase.DRAINING)
            admission = self.service.admission
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._config.drain_timeout_seconds
            await self._wait_until_quiet(grace_seconds)
            admission.close()
            if not await admission.wait_idle(max(0.0, deadline - loop.time())):
                log.warning("drain_timeout", cut_requests=admission.undelivered)
                cut = unavailable("The server shut down before this answer was complete; try again.", "draining")
                admission.cut(cut)
                self.service.engine.abort_all(cut)
        self._http.should_exit = True

    async def _wait_until_quiet(self, quiet_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        cutoff = DrainCutoff.of(began, quiet_seconds, self._config.drain_timeout_seconds)
        admission = self.service.admission
        while wait := cutoff.seconds_until_close(loop.time(), max(began, admission.last_arrival)):  # noqa: ASYNC110 - each request moves it
            await asyncio.sleep(wait)

    def _on_failure(self, failure: RuntimeFailure) -> None:
        self._failure = failure
        self._http.should_exit = True

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread handles signals; an embedding program has its own handlers
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        log.info("signal", name=number.name)
        if self._draining is not None:
            os._exit(128 + number)  # second signal: exit at once
        # Ctrl-C on a terminal: no Service routes to this process, so no grace is needed.
        self.begin_drain(0.0 if number == signal.SIGINT else None)


class _Http(uvicorn.Server):
    """uvicorn without its own signal handlers: a signal means drain here, not stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _log_phase(boot: BootSnapshot) -> None:
    fields: dict[str, object] = {"phase": boot.phase.value, "boot_seconds": boot.total_seconds}
    if boot.message:
        fields["message"] = boot.message
    if boot.phase is Phase.SIZING_KV_CACHE and boot.weights is not None:
        weights = boot.weights
        fields |= {"weights_read_bytes": weights.done_bytes, "weights_read_seconds": round(weights.seconds, 3)}
        if weights.bytes_per_second is not None:
            fields["weights_bytes_per_second"] = round(weights.bytes_per_second)
    write = log.warning if boot.phase is Phase.UNRESPONSIVE else log.info
    write("phase", **fields)
