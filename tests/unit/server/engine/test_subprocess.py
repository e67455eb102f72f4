"""An engine that is faster than HTTP holds up nothing else on the event loop, and loses no event."""

from __future__ import annotations

import asyncio

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine_process.messages import Event, StepDone
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.server.engine import subprocess
from millstream_runtime.server.engine.subprocess import EngineProcessLauncher
from tests.support.hasty_engine import SEQUENCES, STEPS


async def test_many_steps_at_once_are_delivered_a_few_at_a_time_and_all_before_the_end() -> None:
    config = RuntimeConfig(model="/none", served_model_name="tiny", device=Device.CPU)
    delivered: list[float] = []
    per_iteration: list[int] = []
    ended: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()

    def on_event(event: Event) -> None:
        assert isinstance(event, StepDone)
        assert not ended.done()
        delivered.append(event.at_seconds)

    EngineProcessLauncher(config, "tests.support.hasty_engine")(on_event, ended.set_result)
    while not ended.done():
        before = len(delivered)
        await asyncio.sleep(0)
        per_iteration.append(len(delivered) - before)
    assert delivered == [float(step) for step in range(STEPS)]
    assert max(per_iteration) * SEQUENCES <= subprocess.MAX_OUTPUTS_PER_ITERATION
