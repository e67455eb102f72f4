"""An engine in a thread of the test process: no second import of torch, and a test can reach into it.

What crosses the border is encoded and decoded as between two processes, so every test of the server tests the messages.
"""

from __future__ import annotations

import asyncio
import threading

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine_process.loop import EngineLoop, MakeEngine, load_engine
from millstream_runtime.engine_process.messages import (
    Command,
    Event,
    Stop,
    decode_command,
    decode_event,
    encode,
)
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.server.engine.client import OnEnd, OnEvent


class EngineThreads:
    """Launches engines as threads; see `client.EngineLauncher`."""

    def __init__(self, config: RuntimeConfig, make_engine: MakeEngine = load_engine) -> None:
        self._config = config
        self._make_engine = make_engine

    def __call__(self, on_event: OnEvent, on_end: OnEnd) -> _EngineThread:
        return _EngineThread(self._config, self._make_engine, on_event, on_end)


class _EngineThread:
    def __init__(self, config: RuntimeConfig, make_engine: MakeEngine, on_event: OnEvent, on_end: OnEnd) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._on_end = on_end
        self._engine_loop = EngineLoop(self._post, make_engine)
        self._thread = threading.Thread(target=self._run, args=(config,), name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._engine_loop.put(decode_command(encode(command)))

    async def stop(self, timeout_seconds: float) -> bool:
        self._engine_loop.put(Stop())
        await asyncio.to_thread(self._thread.join, timeout_seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """A thread cannot be killed."""

    def _run(self, config: RuntimeConfig) -> None:
        self._engine_loop.run(config)
        self._call(self._on_end, RuntimeFailure(FailureReason.RUNTIME_CRASHED, "The engine thread ended."))

    def _post(self, event: Event) -> None:
        self._call(self._on_event, decode_event(encode(event)))

    def _call(self, callback: OnEvent | OnEnd, argument: Event | RuntimeFailure) -> None:
        try:
            self._event_loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]
        except RuntimeError:  # the event loop has closed
            self._engine_loop.put(Stop())
