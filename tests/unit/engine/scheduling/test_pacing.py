"""A step with prompts lasts about as long as the target says. Pure: times in, work and tokens out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.engine.scheduling.pacing import (
    FIRST_WORK,
    GROWTH_LIMIT,
    LEAST_RATIO,
    MOST_RATIO,
    Pace,
    StepTime,
)
from millstream_runtime.engine.scheduling.prompt_budget import LEAST_PROMPT_TOKENS, StepLoad, tokens_within, work

BALANCE = 1000.0
TARGET = 0.05
MAX_TOKENS = 2048
LOAD = StepLoad(MAX_TOKENS, num_decodes=4)


class Machine:
    """A model of one, in seconds: a decode step takes `decode`, a unit of work `unit`, and a step's prompts `fixed`."""

    def __init__(self, decode: float, unit: float, fixed: float = 0.0) -> None:
        self.decode, self.unit, self.fixed = decode, unit, fixed

    def step(self, prompt_tokens: int, context_tokens: int) -> StepTime:
        done = work(prompt_tokens, context_tokens, BALANCE) if prompt_tokens > 1 else 0.0  # one is as a decode
        return StepTime(4, done, self.decode + (self.fixed + self.unit * done if done else 0.0))

    @property
    def bound(self) -> float:
        return max(TARGET, LEAST_RATIO * self.decode)


def pace_for(machine: Machine) -> Pace:
    """One that has seen four decodes run for a while."""
    pace = Pace(BALANCE, TARGET)
    for _ in range(30):
        pace.observe(machine.step(0, 0))
    return pace


def enter(pace: Pace, machine: Machine, num_tokens: int) -> list[tuple[int, int, StepTime]]:
    """Let a prompt in, chunk by chunk: the context of each, its tokens, and its step."""
    steps, done = [], 0
    while done < num_tokens:
        budget = pace.budget(LOAD)
        tokens = min(max(budget.least_tokens, budget.tokens_behind(done)), num_tokens - done)
        step = machine.step(tokens, done)
        pace.observe(step)
        steps.append((done, tokens, step))
        done += tokens
    return steps


@given(decode=st.floats(1e-4, 0.2), unit=st.floats(1e-6, 5e-4), fixed=st.floats(0.0, 5e-3))
def test_no_step_is_longer_than_the_target_on_any_machine(decode: float, unit: float, fixed: float) -> None:
    """Whatever a token costs, the first guess included, as long as the least chunk fits."""
    machine = Machine(decode, unit, fixed)
    for context, _, step in enter(pace_for(machine), machine, 4000):
        least = machine.step(LEAST_PROMPT_TOKENS, context).seconds
        first = machine.step(64, context).seconds  # before anything is known of what it costs
        assert step.seconds <= max(machine.bound, least, first) * (1 + 1e-9)


def test_the_time_allowed_is_used() -> None:
    machine = Machine(decode=0.002, unit=1e-4)
    steps = enter(pace_for(machine), machine, 8000)
    in_the_middle = [step.seconds for _, tokens, step in steps[5:-1] if tokens > 1]
    assert len(in_the_middle) > 0.9 * len(steps[5:-1])
    assert 0.9 * TARGET < min(in_the_middle) <= max(in_the_middle) < 1.1 * TARGET
    assert steps[6][1] > 2 * steps[-2][1]  # more context costs more, so chunks shrink


@pytest.mark.parametrize("weights_seconds", [0.0, 0.2], ids=["small model", "large model"])
def test_prompts_without_answers_use_the_time_allowed_from_the_start(weights_seconds: float) -> None:
    """As when log-likelihoods are scored: each request ends with its prompt, so no step ever has a decode in it."""
    pace, load = Pace(BALANCE, TARGET), StepLoad(MAX_TOKENS, num_decodes=0, num_prompts=32)
    steps = []
    for _ in range(8):
        allowed = pace.budget(load).work
        steps.append(StepTime(0, allowed, weights_seconds + 1e-4 * allowed))
        pace.observe(steps[-1])
    assert all(step.prompt_work >= FIRST_WORK for step in steps)
    if not weights_seconds:
        assert 0.99 * TARGET < min(step.seconds for step in steps[4:]) <= steps[-1].seconds < 1.01 * TARGET


def test_one_slow_step_of_prompts_alone_costs_those_behind_it_little() -> None:
    pace, load = Pace(BALANCE, TARGET), StepLoad(MAX_TOKENS, num_decodes=0, num_prompts=32)
    for _ in range(8):
        allowed = pace.budget(load).work
        pace.observe(StepTime(0, allowed, 1e-4 * allowed))
    before = pace.budget(load).work
    pace.observe(StepTime(0, before, 20 * TARGET))
    assert pace.budget(load).work > 0.7 * before
    for _ in range(20):  # if all are slower from now on, that is learned
        allowed = pace.budget(load).work
        pace.observe(StepTime(0, allowed, 4e-4 * allowed))
    assert 0.9 * TARGET < 4e-4 * pace.budget(load).work < 1.1 * TARGET


def test_prompts_alone_say_nothing_of_what_prompts_cost_beside_answers() -> None:
    machine = Machine(decode=0.002, unit=1e-4)
    pace, other = pace_for(machine), pace_for(machine)
    for _ in range(10):
        pace.observe(StepTime(0, 2000.0, 10.0))
    assert pace.budget(LOAD) == other.budget(LOAD)


def test_where_a_decode_step_takes_longer_than_the_target_prompts_still_enter() -> None:
    machine = Machine(decode=0.2, unit=1e-3)
    assert max(step.seconds for _, _, step in enter(pace_for(machine), machine, 4000)[5:-1]) > 0.9 * LEAST_RATIO * 0.2


def test_a_burst_behind_short_prompts_has_the_whole_time() -> None:
    """What short prompts cost beyond their tokens, and that they were short, delays later prompts for few steps."""
    machine = Machine(decode=0.005, unit=1e-4, fixed=0.002)
    pace = pace_for(machine)
    enter(pace, machine, 4000)
    for _ in range(20):
        pace.observe(machine.step(10, 0))
        pace.observe(machine.step(0, 0))
    assert machine.step(pace.budget(LOAD).tokens_behind(0), 0).seconds > 0.4 * TARGET
    enter(pace, machine, 600)
    assert machine.step(pace.budget(LOAD).tokens_behind(0), 0).seconds > 0.8 * TARGET


def test_what_is_only_predicted_is_approached() -> None:
    pace = pace_for(Machine(decode=0.002, unit=1e-6))
    largest = 0.0
    for _ in range(12):
        allowed = pace.budget(LOAD).work
        assert allowed <= max(64.0, GROWTH_LIMIT * largest)
        pace.observe(StepTime(4, allowed, 0.002 + 1e-6 * allowed))
        largest = allowed


def test_one_slow_step_does_not_stop_the_prompt() -> None:
    machine = Machine(decode=0.002, unit=1e-4)
    pace = pace_for(machine)
    enter(pace, machine, 2000)
    before = pace.budget(LOAD).tokens_behind(2000)
    slow = machine.step(before, 2000)
    pace.observe(StepTime(slow.num_decodes, slow.prompt_work, slow.seconds * 5))
    if pace.budget(LOAD).least_tokens == 1:  # decodes are timed first: perhaps all steps are slower by now
        pace.observe(machine.step(0, 0))
    assert pace.budget(LOAD).tokens_behind(2000) > before / 5
    for _ in range(12):
        pace.observe(machine.step(pace.budget(LOAD).tokens_behind(2000), 2000))
    assert pace.budget(LOAD).tokens_behind(2000) > 0.8 * before


def prompts_without_pause(pace: Pace, machine: Machine, num_steps: int) -> list[int]:
    """Let steps run that all could have a prompt; return the tokens of each."""
    tokens = []
    for _ in range(num_steps):
        tokens.append(max(1, pace.budget(LOAD).tokens_behind(0)))
        pace.observe(machine.step(tokens[-1], 0))
    return tokens


@given(slower=st.floats(1.0, 20.0))
def test_a_machine_that_others_use_lets_no_fewer_prompts_in(slower: float) -> None:
    """All steps take longer by the same factor. Decodes beyond the target, so the bound grows with them."""
    pace = pace_for(Machine(decode=0.02, unit=1e-4))
    before = max(prompts_without_pause(pace, Machine(decode=0.02, unit=1e-4), 40))
    during = prompts_without_pause(pace, Machine(decode=0.02 * slower, unit=1e-4 * slower), 60)
    assert sum(during[20:]) > 0.6 * before * len(during[20:])


def test_answers_that_become_many_let_no_fewer_prompts_in() -> None:
    """Each step has prompts, and more decodes than the one before, which take longer."""
    pace, unit = Pace(BALANCE, TARGET), 1e-4
    pace.reset(growth=0.1)
    pace.observe(StepTime(1, 0.0, 0.003 * 1.1))
    allowed = []
    for rows in range(1, 128):
        budget = pace.budget(StepLoad(MAX_TOKENS, num_decodes=rows))
        decode = 0.003 * (1 + 0.1 * rows)
        if budget.least_tokens == 1:  # decodes are timed
            pace.observe(StepTime(rows, 0.0, decode))
            continue
        pace.observe(StepTime(rows, budget.work, decode + unit * budget.work))
        allowed.append((budget.work * unit, max(TARGET, LEAST_RATIO * decode) - decode))
    assert len(allowed) > 100
    assert all(used > 0.9 * bound for used, bound in allowed[10:])


def test_while_a_crowd_waits_for_few_answers_steps_may_be_longer() -> None:
    machine = Machine(decode=0.05, unit=1e-4)
    pace = pace_for(machine)
    enter(pace, machine, 4000)

    def seconds(num_decodes: int, num_prompts: int) -> float:
        budget = pace.budget(StepLoad(MAX_TOKENS * 8, num_decodes, num_prompts))
        return machine.step(budget.tokens_behind(0), 0).seconds

    alone, crowd = seconds(4, 1), seconds(4, 8)
    assert 0.9 * LEAST_RATIO * 0.05 < alone <= 1.1 * LEAST_RATIO * 0.05
    assert 1.5 * alone < crowd <= 1.1 * MOST_RATIO * 0.05
    assert seconds(64, 2) <= 1.1 * alone
    pace.is_objective = True
    assert seconds(4, 8) <= 1.1 * alone  # somebody has asked for this latency


@given(decode=st.floats(0.001, 0.2))
def test_a_load_that_never_pauses_is_bounded_by_what_decodes_take_by_now(decode: float) -> None:
    """Its decodes are many, and take longer than those that were timed before it. Each step has a prompt."""
    pace = pace_for(Machine(decode=0.001, unit=1e-4))
    machine = Machine(decode, unit=1e-4)
    seconds = [machine.step(tokens, 0).seconds for tokens in prompts_without_pause(pace, machine, 200)]
    settled = [one for one in seconds[150:] if one > machine.decode]
    assert max(settled) <= 1.1 * machine.bound
    assert min(settled) >= 0.8 * machine.bound
    assert len(settled) >= 45


@given(allowed=st.floats(1.0, 1e7), context=st.integers(0, 1 << 20), balance=st.floats(100.0, 1e6))
def test_the_arithmetic_fills_the_work_and_no_more(allowed: float, context: int, balance: float) -> None:
    tokens = tokens_within(allowed, context, balance)
    assert work(tokens, context, balance) <= allowed * (1 + 1e-6)
    assert work(tokens + 2, context, balance) > allowed * (1 - 1e-6)
