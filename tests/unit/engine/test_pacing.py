"""A prompt that enters takes as much of a step as the answers under way can spare. Pure: times in, tokens out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.engine.pacing import (
    LEAST_PROMPT_TOKENS,
    LEAST_TARGET_RATIO,
    TARGET_RATIO,
    Pace,
    StepTime,
    prompt_tokens_within,
    work,
)

BALANCE = 1000.0


class Machine:
    """A model of one: a decode step takes `decode`, a unit of work `unit`, and each chunk `fixed`, in seconds."""

    def __init__(self, decode: float, unit: float, fixed: float = 0.0) -> None:
        self.decode, self.unit, self.fixed = decode, unit, fixed

    def step(self, prompt_tokens: int, context_tokens: int) -> StepTime:
        extra = self.fixed + self.unit * work(prompt_tokens, context_tokens, BALANCE) if prompt_tokens else 0.0
        return StepTime(4, prompt_tokens, context_tokens, self.decode + extra)


def prefill(pace: Pace, machine: Machine, num_tokens: int) -> list[StepTime]:
    """Let a prompt enter beside four decodes that were running for a while."""
    for _ in range(30):
        pace.observe(machine.step(0, 0))
    steps, done = [], 0
    while done < num_tokens:
        limit = pace.limit(done)
        assert limit is not None
        steps.append(machine.step(min(limit, num_tokens - done), done))
        pace.observe(steps[-1])
        done += steps[-1].prompt_tokens
    return steps


@given(
    decode=st.floats(1e-4, 1.0),
    relative=st.floats(1e-4, 0.02),
    fixed=st.floats(0.0, 1.0),
)
def test_no_step_is_longer_than_promised_on_any_machine(decode: float, relative: float, fixed: float) -> None:
    """Whatever a token costs, the first guess included, as long as the least chunk fits at all."""
    machine = Machine(decode, decode * relative, decode * fixed)
    for step in prefill(Pace(BALANCE), machine, 4000):
        least = machine.step(LEAST_PROMPT_TOKENS, step.context_tokens).seconds
        assert step.seconds <= max(4 * decode, least)


def test_the_time_allowed_is_used() -> None:
    machine = Machine(decode=0.002, unit=1e-5)
    steps = prefill(Pace(BALANCE), machine, 8000)
    in_the_middle = [step.seconds / machine.decode for step in steps[5:-1]]
    assert min(in_the_middle) > 0.8 * TARGET_RATIO
    assert max(in_the_middle) < 1.1 * TARGET_RATIO
    assert steps[6].prompt_tokens > 2 * steps[-2].prompt_tokens  # more context costs more, so chunks shrink


def test_one_slow_step_does_not_stop_the_prompt() -> None:
    machine, pace = Machine(decode=0.002, unit=1e-5), Pace(BALANCE)
    prefill(pace, machine, 2000)
    before = pace.limit(2000)
    slow = machine.step(50, 2000)
    pace.observe(StepTime(slow.num_decodes, slow.prompt_tokens, slow.context_tokens, slow.seconds * 5))
    after = pace.limit(2000)
    assert before is not None
    assert after is not None
    assert after > before / 5
    for _ in range(8):
        pace.observe(machine.step(pace.limit(2000) or 0, 2000))
    assert (pace.limit(2000) or 0) > 0.8 * before


def test_nothing_is_bounded_before_an_answer_was_timed() -> None:
    pace = Pace(BALANCE)
    assert pace.limit(0) is None
    pace.observe(StepTime(0, 500, 0, 0.1))
    assert pace.limit(0) is None


def test_a_prompt_goes_on_even_where_a_single_token_costs_too_much() -> None:
    assert prefill(Pace(BALANCE), Machine(decode=0.001, unit=1.0), 100)[-1].prompt_tokens > 0


@given(
    seconds=st.floats(1e-4, 10.0),
    cost=st.floats(1e-7, 1e-3),
    context=st.integers(0, 1 << 20),
    balance=st.floats(100.0, 1e6),
)
def test_the_arithmetic_fills_the_time_and_no_more(seconds: float, cost: float, context: int, balance: float) -> None:
    tokens = prompt_tokens_within(seconds, cost, context, balance)
    assert work(tokens, context, balance) * cost <= seconds * (1 + 1e-6)
    assert work(tokens + 2, context, balance) * cost > seconds * (1 - 1e-6)


def test_where_many_steps_are_slower_than_predicted_chunks_shrink_within_reason() -> None:
    """On a busy machine each sixth step takes three times as long: the mean gives way, the prompt still enters."""
    machine = Machine(decode=0.002, unit=1e-5)
    quiet, busy = Pace(BALANCE), Pace(BALANCE)
    for pace in (quiet, busy):
        prefill(pace, machine, 1000)
    for index in range(120):
        for pace in (quiet, busy):
            step = machine.step(pace.limit(1000) or 0, 1000)
            noise = 3.0 if pace is busy and index % 6 == 0 and index < 110 else 1.0
            pace.observe(StepTime(step.num_decodes, step.prompt_tokens, step.context_tokens, step.seconds * noise))
    seconds = machine.step(busy.limit(1000) or 0, 1000).seconds
    assert seconds < 0.9 * machine.step(quiet.limit(1000) or 0, 1000).seconds
    assert seconds > 0.9 * LEAST_TARGET_RATIO * machine.decode
