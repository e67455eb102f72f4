"""What an engine process said before it ended is read, however busy the server's event loop was at its end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine_process.messages import Event, Failed
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.server.engine import subprocess as engine_subprocess
from millstream_runtime.server.engine.subprocess import EngineProcessLauncher


async def test_the_reason_of_a_process_that_ended_before_the_loop_could_look_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_subprocess, "EXIT_GRACE_SECONDS", 0.0)  # the loop was busy for longer
    events: list[Event] = []
    ends: asyncio.Queue[RuntimeFailure] = asyncio.Queue()
    config = RuntimeConfig(model=str(tmp_path / "missing"), served_model_name="m", device=Device.CPU)
    launcher = EngineProcessLauncher(config)
    launcher.prepare()
    process = launcher._prepared.process  # type: ignore[union-attr]
    process.wait(timeout=240)
    launcher(events.append, ends.put_nowait)
    time.sleep(0.3)  # noqa: ASYNC251 - the loop is busy while the exit is noticed
    assert (await ends.get()).reason is FailureReason.RUNTIME_CRASHED
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.reason for event in failed] == [FailureReason.CHECKPOINT_INVALID]
