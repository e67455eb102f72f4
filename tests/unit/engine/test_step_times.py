"""The warm-up times decode steps and a prompt, and `/ready` says what it timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.boot import BootLedger
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import FinishReason, Request, TokenOutput
from millstream_runtime.engine.step_times import StepTimer
from millstream_runtime.server.operations.readiness import ready_body
from tests.support.tiny_model import write_tiny_model


def engine_of(tmp_path: Path, **limits: Any) -> Engine:
    model = str(write_tiny_model(tmp_path / "tiny"))
    return Engine(RuntimeConfig(model=model, served_model_name="tiny", **limits), lambda phase, message: None)


def test_an_engine_that_warmed_up_knows_the_time_of_its_steps(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, max_num_seqs=8)
    engine.warm_up()
    one, batch, prompt = tuple(engine.step_times)
    assert (one.sequences, one.new_tokens, batch.sequences, batch.new_tokens) == (1, 1, 8, 8)
    assert (prompt.sequences, prompt.new_tokens, prompt.context_tokens) == (1, 64, 0)
    assert 0 < one.context_tokens < batch.context_tokens
    assert min(time.step_microseconds for time in engine.step_times) > 0
    assert not engine.has_work()
    assert engine.stats().kv_blocks_used == 0
    engine.close()


def test_one_sequence_is_timed_once_and_a_short_model_times_no_long_prompt(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, max_num_seqs=1, max_model_len=16, max_num_batched_tokens=16)
    engine.warm_up()
    assert [(time.sequences, time.new_tokens) for time in engine.step_times] == [(1, 1)]
    engine.close()


class PacedEngine:
    """A fake engine whose steps take a known time: 1 ms, and 0.5 ms per request or prompt token."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self.running: dict[str, list[int]] = {}  # tokens of the prompt to compute, tokens to generate
        self.prompts: dict[str, list[int]] = {}

    def clock(self) -> float:
        return self.seconds

    def add_request(self, request: Request) -> None:
        self.prompts[request.request_id] = list(request.prompt_token_ids)
        self.running[request.request_id] = [len(request.prompt_token_ids), request.sampling.max_tokens]

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[TokenOutput]:
        self.steps += 1
        self.seconds += 0.001 + 0.0005 * sum(prompt or 1 for prompt, _ in self.running.values())
        outputs = [TokenOutput(name, 1, FinishReason.LENGTH) for name in self.running]
        self.running = {name: [0, left - 1] for name, (_, left) in self.running.items() if left > 1}
        return outputs


@pytest.mark.parametrize(("on_cpu", "sequences", "prompt"), [(False, 256, 2048), (True, 16, 64)])
def test_what_is_timed_is_the_step_and_not_the_first_ones(on_cpu: bool, sequences: int, prompt: int) -> None:
    engine = PacedEngine()
    timer = StepTimer(engine, lambda num_tokens: 256, 1000, on_cpu=on_cpu, clock=engine.clock)
    one, batch, first_token = timer.run(4096)
    assert one.step_microseconds == 1500
    assert (batch.sequences, batch.step_microseconds) == (sequences, 1000 + 500 * sequences)
    assert (first_token.new_tokens, first_token.step_microseconds) == (prompt, 1000 + 500 * prompt)
    assert engine.prompts["prompt-time-0"] != engine.prompts["prompt-time-1"], "no prefix is cached"
    assert len({tuple(engine.prompts[f"step-time-{number}"]) for number in range(16)}) == 16, "other experts"


def test_slow_steps_are_few() -> None:
    engine = PacedEngine()
    timer = StepTimer(engine, lambda num_tokens: 4096, 1000, on_cpu=False, clock=engine.clock)
    timer.run(1)
    assert engine.steps <= 2 * (3 + 8) + 2
    before = engine.steps
    StepTimer(engine, lambda num_tokens: 1 << 20, 1 << 30, on_cpu=True, clock=lambda: 10 * engine.clock()).run(1)
    assert engine.steps - before < 22


def test_ready_reports_them(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, max_num_seqs=4)
    engine.warm_up()
    config = RuntimeConfig(model="m", served_model_name="m")
    body = ready_body(
        config, BootLedger().snapshot(), topology=None, memory=None, step_times=engine.step_times, now_seconds=0.0
    )
    assert [set(time) for time in body["step_times"]] == [
        {"sequences", "new_tokens", "context_tokens", "step_microseconds"}
    ] * 3
    assert all(type(value) is int for time in body["step_times"] for value in time.values())
    engine.close()
