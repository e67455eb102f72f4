"""Where a prompt's chunk is bounded in a plan, and that the bound changes no token of anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.cpu.policy import CpuPolicy
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.model_runner import Launched
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.prompt_budget import PromptBudget
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import BudgetOf, Chunk
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep


def sequence(arrival: int, num_tokens: int) -> Sequence:
    prompt = [arrival] * num_tokens
    return Sequence(Request(str(arrival), prompt, SamplingParams(100)), arrival, 0, list(prompt), num_tokens)


def sizes(chunks: list[Chunk]) -> list[int]:
    return [chunk.num_tokens for chunk in chunks]


def make_scheduler(*prompts: int) -> Scheduler:
    scheduler = Scheduler(BlockManager(1000, 16, 8, enable_prefix_caching=False), 512, 8)
    for arrival, num_tokens in enumerate(prompts):
        scheduler.add(sequence(arrival, num_tokens))
    return scheduler


def decode(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    scheduler.advance(chunks)
    for one in sampling:
        one.append(7)


def within(work: float) -> BudgetOf:
    return lambda load: PromptBudget(load.max_tokens, work)


def test_time_bounds_the_prompts_of_a_step_that_others_share() -> None:
    scheduler = make_scheduler(20)
    chunks = scheduler.apply(scheduler.plan(within(8)))
    assert sizes(chunks) == [20]  # nobody waits for a token: the whole budget is the prompt's
    decode(scheduler, chunks)
    scheduler.add(sequence(1, 300))
    scheduler.add(sequence(2, 300))
    chunks = scheduler.apply(scheduler.plan(within(100)))
    assert sizes(chunks) == [1, 100]  # the decode is never part of it, and the second prompt waits its turn
    decode(scheduler, chunks)
    chunks = scheduler.apply(scheduler.plan(within(250)))
    assert sizes(chunks) == [1, 200, 50]
    decode(scheduler, chunks)
    assert sizes(scheduler.apply(scheduler.plan())) == [1, 1, 250]


def test_several_prompts_share_a_bounded_step_also_without_an_answer_under_way() -> None:
    """So the first of a burst has its first token before the last is computed."""
    scheduler = make_scheduler(40, 40, 40, 40)
    assert sizes(scheduler.apply(scheduler.plan(within(80)))) == [40, 40]


def test_a_bound_above_the_budget_changes_nothing() -> None:
    scheduler = make_scheduler(20)
    decode(scheduler, scheduler.apply(scheduler.plan()))
    scheduler.add(sequence(1, 2000))
    assert sizes(scheduler.apply(scheduler.plan(within(4000)))) == [1, 511]


DEMO_MODEL = Path(__file__).resolve().parents[4] / "models" / "demo-chat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


class MachineWithAClock:
    """An engine on a machine where a decode takes 10 ms, and a token of a prompt `second_per_token`."""

    def __init__(self, folder: Path, second_per_token: float, target_itl_milliseconds: int | None = None) -> None:
        config = RuntimeConfig(
            model=str(folder),
            served_model_name="t",
            device=Device.CPU,
            kv_cache_memory_bytes=64 << 20,
            target_itl_milliseconds=target_itl_milliseconds,
        )
        self.engine = Engine(config, lambda phase, message: None, execution=Execution())
        self.step_seconds: list[float] = []  # of steps that prompts shared with decodes
        self._second_per_token = second_per_token
        self._launch = self.engine._runner.launch
        self.engine._runner.launch = self._timed  # type: ignore[method-assign]
        self._now = 0.0
        self.engine.step_clock = lambda: self._now

    def _timed(self, chunks: list[Chunk]) -> Launched:
        prompts = [chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1]
        seconds = 0.01 + self._second_per_token * sum(prompts)
        self._now += seconds
        if prompts and len(chunks) > len(prompts):
            self.step_seconds.append(seconds)
        return self._launch(chunks)

    def answers_of_a_burst(self) -> dict[str, list[int]]:
        """One answer runs when 15 prompts come at once."""
        answers: dict[str, list[int]] = {str(index): [] for index in range(16)}
        for index in range(16):
            if index == 1:
                while len(answers["0"]) < 8:
                    self._step_into(answers)
            prompt = [3 + index] * (20 + 11 * index)
            self.engine.add_request(Request(str(index), prompt, SamplingParams(12, 0.0, ignore_eos=True)))
        while self.engine.has_work():
            self._step_into(answers)
        self.engine.check_integrity()
        return answers

    def _step_into(self, answers: dict[str, list[int]]) -> None:
        for output in self.engine.step():
            assert output.token_id is not None
            answers[output.request_id].append(output.token_id)

    def answers(self) -> dict[str, list[int]]:
        """Two answers run when a prompt of 600 tokens comes."""
        answers: dict[str, list[int]] = {"a": [], "b": [], "long": []}
        long = Request("long", [index % 250 for index in range(600)], SamplingParams(5, 0.0, ignore_eos=True))
        for name in ("a", "b"):
            self.engine.add_request(Request(name, [1, 2, 3, ord(name)], SamplingParams(300, 0.0, ignore_eos=True)))
        while self.engine.has_work():
            if len(answers["a"]) == 10 and long.request_id not in self.engine._sequences and not answers["long"]:
                self.engine.add_request(long)
            self._step_into(answers)
        self.engine.check_integrity()
        return answers


@pytest.mark.parametrize(("target", "seconds"), [(None, 0.05), (30, 0.03), (100, 0.1)])
def test_a_long_prompt_enters_in_chunks_that_keep_to_the_target_and_changes_no_answer(
    folder: Path, target: int | None, seconds: float
) -> None:
    paced, unpaced = MachineWithAClock(folder, 0.0005, target), MachineWithAClock(folder, 0.0)
    assert paced.answers() == unpaced.answers()
    assert max(paced.step_seconds[1:]) <= 1.05 * seconds
    assert len(paced.step_seconds) <= 600 * 0.0005 / (seconds - 0.01) + 5, "and no smaller than that"
    assert len(paced.step_seconds) > len(unpaced.step_seconds)


def test_a_burst_enters_in_several_steps_and_changes_no_answer_of_the_demo_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The 15 prompts have 1,620 tokens: without a bound one step of 0.82 s."""
    paced = MachineWithAClock(DEMO_MODEL, 0.0005)
    with monkeypatch.context() as patch:
        patch.setattr(CpuPolicy, "default_target_itl_milliseconds", None)
        unpaced = MachineWithAClock(DEMO_MODEL, 0.0005)
    assert unpaced.engine.stats().prompt_pace is None
    assert paced.answers_of_a_burst() == unpaced.answers_of_a_burst()
    assert unpaced.engine.stats().prompt_pace is None, "time bounds nothing there"
    chosen = paced.engine.stats().prompt_pace
    assert chosen is not None
    assert chosen.target_itl_seconds == 0.05
    assert len(paced.step_seconds) > len(unpaced.step_seconds)
    assert max(unpaced.step_seconds) > 0.8
    assert max(paced.step_seconds) <= 1.05 * 0.16, "16 decode steps"


def test_on_a_gpu_no_time_bounds_a_prompt_unless_a_target_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPolicy, "default_target_itl_milliseconds", None)
    slow, asked = MachineWithAClock(folder, 0.0005), MachineWithAClock(folder, 0.0005, 50)
    assert slow.answers() == asked.answers()
    assert len(slow.step_seconds) == 1
    assert len(asked.step_seconds) > 5
