"""A real server on a loopback port, in a thread of the test process: real sockets, a real engine, no second torch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine_process.loop import MakeEngine, load_engine
from millstream_runtime.server.engine.client import EngineLauncher
from millstream_runtime.server.engine.watchdog import NO_PROGRESS_SECONDS, STUCK_SECONDS
from millstream_runtime.server.http.connection_limits import ConnectionLimits
from millstream_runtime.server.http.sockets import bind
from millstream_runtime.server.model_server import ModelServer
from tests.support.engine_thread import EngineThreads

PATIENCE_SECONDS = 120.0  # a machine that does much else needs a minute to import torch


class ServerThread:
    """One ModelServer; `url` ends without a slash."""

    def __init__(
        self,
        config: RuntimeConfig,
        launch_engine: EngineLauncher,
        drain_grace_seconds: float,
        restart_delays_seconds: Sequence[float],
        no_progress_seconds: float,
        stuck_seconds: float,
        live_config: Path | None = None,
        limits_of_connections: ConnectionLimits | None = None,
    ) -> None:
        self.config = config
        self.ledger = BootLedger(process_age_seconds=0.0)
        listener = bind(config.host, config.port)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.failure: BaseException | None = None
        self._listener = listener
        self._launch_engine = launch_engine
        self._drain_grace_seconds = drain_grace_seconds
        self._restart_delays_seconds = restart_delays_seconds
        self._no_progress_seconds = no_progress_seconds
        self._stuck_seconds = stuck_seconds
        self._live_config = live_config
        self._limits_of_connections = limits_of_connections
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="server", daemon=True)

    def start(self) -> ServerThread:
        self._thread.start()
        assert self._started.wait(PATIENCE_SECONDS)
        return self

    def _main(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self.server = ModelServer(
                self.config,
                self._listener,
                self.ledger,
                self._launch_engine,
                drain_grace_seconds=self._drain_grace_seconds,
                restart_delays_seconds=self._restart_delays_seconds,
                no_progress_seconds=self._no_progress_seconds,
                stuck_seconds=self._stuck_seconds,
                live_config=self._live_config,
                limits_of_connections=self._limits_of_connections,
            )
            self._started.set()
            await self.server.run()

        try:
            asyncio.run(run())
        except BaseException as error:
            self.failure = error

    def wait_ready(self) -> ServerThread:
        wait_for(lambda: self.ledger.snapshot().phase in (Phase.READY, Phase.FAILED), "Ready")
        assert self.ledger.snapshot().phase is Phase.READY, self.ledger.snapshot().message
        return self

    def begin_drain(self, grace_seconds: float | None = None) -> None:
        """What SIGTERM does."""
        self._loop.call_soon_threadsafe(self.server.begin_drain, grace_seconds)

    def reload_live_config(self) -> None:
        """Read the file of the live half now, and wait until the event loop has what is in it."""
        assert self.server.live_config is not None
        self.server.live_config.reload()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(PATIENCE_SECONDS)

    def join(self) -> None:
        """Wait for the end of `run()`."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_SECONDS)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_SECONDS)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0.0 when it is absent."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


@contextmanager
def serving(
    folder: Path,
    *,
    make_engine: MakeEngine = load_engine,
    launcher: Callable[[RuntimeConfig], EngineLauncher] | None = None,
    drain_grace_seconds: float = 0.0,
    restart_delays_seconds: Sequence[float] = (),
    no_progress_seconds: float = NO_PROGRESS_SECONDS,
    stuck_seconds: float = STUCK_SECONDS,
    live_config: Path | None = None,
    limits_of_connections: ConnectionLimits | None = None,
    **overrides: Any,
) -> Iterator[ServerThread]:
    """Serve `folder` on a free port, and drain at the end. `overrides` are RuntimeConfig fields.

    Args:
        launcher: where the engine runs; by default in a thread, made by `make_engine`.
        restart_delays_seconds: by default an engine that dies is not started again, which a thread could not survive.
    """
    settings: dict[str, Any] = {
        "model": str(folder),
        "served_model_name": "tiny",
        "device": Device.CPU,
        "host": "127.0.0.1",
        "port": 0,
        "kv_cache_memory_bytes": 8 << 20,
        "heartbeat_interval_seconds": 0,
        "drain_timeout_seconds": 60,
    }
    config = RuntimeConfig(**{**settings, **overrides})
    launch = launcher(config) if launcher is not None else EngineThreads(config, make_engine)
    server = ServerThread(
        config,
        launch,
        drain_grace_seconds,
        restart_delays_seconds,
        no_progress_seconds,
        stuck_seconds,
        live_config,
        limits_of_connections,
    ).start()
    try:
        yield server
    finally:
        if server.running:
            server.begin_drain(0.0)
            server.join()


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until `condition` holds; the limit only guards against a hang."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:.0f} s for: {what}"
        time.sleep(0.01)
