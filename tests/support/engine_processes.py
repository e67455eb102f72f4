"""A server whose engine runs in a process of its own, as in production, and which a test may kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.server.engine.client import OnEnd, OnEvent
from millstream_runtime.server.engine.subprocess import EngineProcessLauncher, EngineSubprocess
from tests.support.server_thread import ServerThread, serving


class WatchedProcesses(EngineProcessLauncher):
    """Remembers what it launched, so that a test can kill it."""

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config)
        self.launched: list[EngineSubprocess] = []

    def __call__(self, on_event: OnEvent, on_end: OnEnd) -> EngineSubprocess:
        self.launched.append(super().__call__(on_event, on_end))
        return self.launched[-1]


@contextmanager
def serving_from_a_process(folder: Path, **settings: Any) -> Iterator[tuple[ServerThread, WatchedProcesses]]:
    made: list[WatchedProcesses] = []

    def launcher(config: RuntimeConfig) -> WatchedProcesses:
        made.append(WatchedProcesses(config))
        return made[0]

    with serving(folder, launcher=launcher, **settings) as server:
        yield server, made[0]
