"""An engine that is faster than HTTP holds up nothing else on the event loop, and loses no event."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine_process.messages import Event, PhaseEntered, PromptLogprobs, StepDone, decode_event
from millstream_runtime.engine_process.prompt_parts import PART_TOKENS
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.server.engine import subprocess
from millstream_runtime.server.engine.subprocess import EngineProcessLauncher
from tests.support.hasty_engine import PROMPT_TOKENS, SEQUENCES, STEPS


async def test_many_steps_at_once_are_delivered_a_few_at_a_time_and_all_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RuntimeConfig(model="/none", served_model_name="tiny", device=Device.CPU)
    delivered: list[StepDone] = []
    decoded: list[int] = []  # tokens, message by message
    tokens_per_iteration: list[int] = []
    ended: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()

    def on_event(event: Event) -> None:
        assert isinstance(event, StepDone)
        assert not ended.done()
        delivered.append(event)

    def decode_and_count(payload: bytes) -> Event:
        event = decode_event(payload)
        assert isinstance(event, StepDone | PromptLogprobs)
        decoded.append(len(event.entries if isinstance(event, PromptLogprobs) else event.outputs))
        return event

    monkeypatch.setattr(subprocess, "decode_event", decode_and_count)
    EngineProcessLauncher(config, "tests.support.hasty_engine")(on_event, ended.set_result)
    while not ended.done():
        before = len(decoded)
        await asyncio.sleep(0)
        tokens_per_iteration.append(sum(decoded[before:]))
    assert [step.at_seconds for step in delivered] == [float(step) for step in range(STEPS + 1)]
    assert sum(decoded) == STEPS * SEQUENCES + PROMPT_TOKENS + 1
    # The last message of an iteration may begin just below the limit.
    assert max(tokens_per_iteration) < subprocess.MAX_OUTPUTS_PER_ITERATION + PART_TOKENS
    prefill = delivered[-1].outputs[0].prefill
    assert prefill is not None
    assert prefill.prompt_logprobs is not None
    assert [one.token_id for one in prefill.prompt_logprobs[1:] if one is not None] == [*range(1, PROMPT_TOKENS)]


async def test_a_stopped_process_of_an_engine_does_not_outlive_it() -> None:
    """A rank that is stopped cannot see that the engine is gone, and held its memory, or a GPU's, for ever."""
    config = RuntimeConfig(model="/none", served_model_name="tiny", device=Device.CPU)
    children: list[int] = []
    ended: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()

    def on_event(event: Event) -> None:
        assert isinstance(event, PhaseEntered)
        children.append(int(event.message))

    EngineProcessLauncher(config, "tests.support.engine_with_a_stopped_child")(on_event, ended.set_result)
    assert "exit code 1" in (await ended).message
    while is_alive(children[0]):  # noqa: ASYNC110 - another process ends
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
