"""A prompt that enters takes as much of a step as the answers under way can spare. Pure: times in, tokens and layers
out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.engine.scheduling.pacing import (
    EFFICIENT_PROMPT_TOKENS,
    LEAST_PROMPT_TOKENS,
    LEAST_TARGET_RATIO,
    TARGET_RATIO,
    Pace,
    StepTime,
    evenly,
    tokens_within,
    work,
)

BALANCE = 1000.0
LAYERS = 12


class Machine:
    """A model of one, in seconds: a decode step takes `decode`, a unit of work `unit`, and each slice `fixed`."""

    def __init__(self, decode: float, unit: float, fixed: float = 0.0) -> None:
        self.decode, self.unit, self.fixed = decode, unit, fixed

    def step(self, prompt_tokens: int, context_tokens: int, layers: int = LAYERS) -> StepTime:
        done = work(prompt_tokens, context_tokens, BALANCE) * layers / LAYERS
        return StepTime(4, done, self.decode + (self.fixed + self.unit * done if done else 0.0))


def pace_for(machine: Machine) -> Pace:
    """One that has seen four decodes run for a while."""
    pace = Pace(BALANCE, LAYERS)
    for _ in range(30):
        pace.observe(machine.step(0, 0))
    return pace


def enter(pace: Pace, machine: Machine, num_tokens: int, start: int = 0) -> list[tuple[int, int, StepTime]]:
    """Let a prompt in, slice by slice: the context of each, its tokens, and its step."""
    steps, done = [], start
    while done < num_tokens:
        limit = pace.most_tokens(done)
        assert limit is not None
        tokens, left = min(limit, num_tokens - done), LAYERS
        while left:
            layers = min(left, pace.layers(work(tokens, done, BALANCE)))
            step = machine.step(tokens, done, layers)
            pace.observe(step)
            steps.append((done, tokens, step))
            left -= layers
        done += tokens
    return steps


@given(decode=st.floats(1e-4, 1.0), relative=st.floats(1e-4, 0.05), fixed=st.floats(0.0, 1.0))
def test_no_step_is_longer_than_promised_on_any_machine(decode: float, relative: float, fixed: float) -> None:
    """Whatever a token costs, the first guess included, as long as one layer of the least chunk fits at all."""
    machine = Machine(decode, decode * relative, decode * fixed)
    for context, _, step in enter(pace_for(machine), machine, 4000):
        least = machine.step(LEAST_PROMPT_TOKENS, context, layers=1).seconds
        assert step.seconds <= max(4 * decode, least) * (1 + 1e-9)


def test_the_time_allowed_is_used() -> None:
    machine = Machine(decode=0.002, unit=1e-5)
    steps = enter(pace_for(machine), machine, 8000)
    in_the_middle = [step.seconds / machine.decode for _, _, step in steps[5:-1]]
    assert min(in_the_middle) > 0.75 * TARGET_RATIO
    assert max(in_the_middle) < 1.15 * TARGET_RATIO
    assert steps[6][1] > 2 * steps[-LAYERS][1]  # more context costs more, so chunks shrink


def test_behind_a_long_context_a_chunk_keeps_its_size_and_is_cut_along_the_layers() -> None:
    """Where only two tokens would fit into a step in whole."""
    machine = Machine(decode=0.002, unit=1e-4)
    steps = enter(pace_for(machine), machine, 30_200, start=30_000)
    settled = [(tokens, step.seconds / machine.decode) for _, tokens, step in steps[LAYERS:-LAYERS]]
    assert min(tokens for tokens, _ in settled) >= LEAST_PROMPT_TOKENS
    assert max(ratio for _, ratio in settled) <= 4.0
    whole = machine.step(LEAST_PROMPT_TOKENS, 30_000).seconds / machine.decode
    assert whole > 10, "a whole chunk would have made each answer wait so long"


def test_a_chunk_that_is_cut_is_as_large_as_computes_well_where_that_fits() -> None:
    machine = Machine(decode=0.002, unit=4e-5)
    steps = enter(pace_for(machine), machine, 8000, start=7000)
    assert min(tokens for _, tokens, _ in steps[LAYERS:-LAYERS]) >= 0.9 * EFFICIENT_PROMPT_TOKENS


@given(num_layers=st.integers(1, 100), most=st.integers(1, 100))
def test_slices_of_layers_are_about_equal(num_layers: int, most: int) -> None:
    layers = evenly(num_layers, min(most, num_layers))
    num_slices = -(-num_layers // layers)
    assert 1 <= layers <= most
    assert num_layers >= 0.9 * layers * num_slices


def test_one_slow_step_does_not_stop_the_prompt() -> None:
    machine = Machine(decode=0.002, unit=1e-5)
    pace = pace_for(machine)
    enter(pace, machine, 2000)
    before = pace.most_tokens(2000)
    slow = machine.step(50, 2000)
    pace.observe(StepTime(slow.num_decodes, slow.prompt_work, slow.seconds * 5))
    after = pace.most_tokens(2000)
    assert before is not None
    assert after is not None
    assert after > before / 5
    for _ in range(8):
        pace.observe(machine.step(pace.most_tokens(2000) or 0, 2000))
    assert (pace.most_tokens(2000) or 0) > 0.8 * before


def test_what_answers_take_longer_by_themselves_is_not_laid_to_the_prompt() -> None:
    """Their contexts grow while it enters. Where a step tells their time, the rest of it is the prompt's."""
    machine = Machine(decode=0.002, unit=1e-5)
    pace = pace_for(machine)
    for _ in range(20):
        step = machine.step(pace.most_tokens(1000) or 0, 1000)
        pace.observe(StepTime(4, step.prompt_work, step.seconds + 0.001, decode_seconds=0.003))
    tokens = pace.most_tokens(1000) or 0
    seconds = 0.003 + machine.unit * work(tokens, 1000, BALANCE)
    assert 0.85 * TARGET_RATIO <= seconds / machine.decode <= 1.05 * TARGET_RATIO


def test_nothing_is_bounded_before_an_answer_was_timed() -> None:
    pace = Pace(BALANCE, LAYERS)
    assert pace.most_tokens(0) is None
    assert pace.layers(1e9) == LAYERS
    pace.observe(StepTime(0, 500.0, 0.1))
    assert pace.most_tokens(0) is None


def test_a_prompt_goes_on_even_where_a_single_token_costs_too_much() -> None:
    machine = Machine(decode=0.001, unit=1.0)
    context, tokens, _ = enter(pace_for(machine), machine, 100)[-1]
    assert context + tokens == 100


@given(
    allowed=st.floats(1.0, 1e7),
    context=st.integers(0, 1 << 20),
    balance=st.floats(100.0, 1e6),
)
def test_the_arithmetic_fills_the_work_and_no_more(allowed: float, context: int, balance: float) -> None:
    tokens = tokens_within(allowed, context, balance)
    assert work(tokens, context, balance) <= allowed * (1 + 1e-6)
    assert work(tokens + 2, context, balance) > allowed * (1 - 1e-6)


def test_where_many_steps_are_slower_than_predicted_chunks_shrink_within_reason() -> None:
    """On a busy machine each sixth step takes three times as long: the mean gives way, the prompt still enters."""
    machine = Machine(decode=0.002, unit=1e-5)
    quiet, busy = pace_for(machine), pace_for(machine)
    for pace in (quiet, busy):
        enter(pace, machine, 1000)
    for index in range(120):
        for pace in (quiet, busy):
            step = machine.step(pace.most_tokens(1000) or 0, 1000)
            noise = 3.0 if pace is busy and index % 6 == 0 and index < 110 else 1.0
            pace.observe(StepTime(step.num_decodes, step.prompt_work, step.seconds * noise))
    seconds = machine.step(busy.most_tokens(1000) or 0, 1000).seconds
    assert seconds < 0.9 * machine.step(quiet.most_tokens(1000) or 0, 1000).seconds
    assert seconds > 0.9 * LEAST_TARGET_RATIO * machine.decode
