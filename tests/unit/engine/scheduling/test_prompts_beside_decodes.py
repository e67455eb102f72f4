"""Prompts that come while answers are generated, on machines whose steps take known times. Nothing looks at a clock.

The scheduler and the pace are the engine's own; a step takes what the model of the machine says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.pacing import (
    LEAST_RATIO,
    MOST_CROWD_SECONDS,
    Pace,
    StepTime,
    longest_step_seconds,
)
from millstream_runtime.engine.scheduling.prompt_budget import StepLoad
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence

TARGET_SECONDS = 0.05
BALANCE_TOKENS = 40_000.0  # attention costs little behind short contexts, as with the machines here
MAX_SEQUENCES = 32
ANSWER_TOKENS = 40
FIRST_STEPS = 3  # with prompts and decodes: what a prompt costs is learned from them


@dataclass(frozen=True)
class Machine:
    """Seconds of a decode step and of each of its rows, and of each token of a prompt."""

    step: float
    row: float
    prompt_token: float

    def decode_seconds(self, num_decodes: int) -> float:
        return self.step + self.row * num_decodes


@dataclass(frozen=True)
class Step:
    """One step of a run. `waiting_prompts`: under way or waiting, before it."""

    num_decodes: int
    prompt_tokens: int
    waiting_prompts: int
    seconds: float


# A model of one billion weights on two cores with AVX512_BF16: 58 ms for one row and 86 for 16, as measured; 370 tokens
# per second, at the measured speed of its products alone.
LARGE = Machine(0.056, 0.0019, 0.0027)
SMALL = Machine(0.0098, 0.0007, 0.00035)  # one of 135 million
TOKENS_BETWEEN = {"burst": 0, "steady": 250}  # of prompts, in whose time the next request comes; on average


def run(machine: Machine, pace: Pace, tokens_between: int, num_requests: int = 24) -> Iterator[Step]:
    """Yield the steps of a server whose requests come at random moments, until all are answered."""
    seconds_between = machine.prompt_token * tokens_between
    rng = random.Random(1)
    scheduler = Scheduler(BlockManager(4000, 16, MAX_SEQUENCES, enable_prefix_caching=False), 2048, MAX_SEQUENCES)
    now, arrives_at = 0.0, 0.0
    coming: list[tuple[float, Sequence]] = []
    for arrival in range(num_requests):
        prompt = [arrival] * rng.randint(20, 400)
        request = Request(str(arrival), prompt, SamplingParams(ANSWER_TOKENS))
        coming.append((arrives_at, Sequence(request, arrival, 0, list(prompt), len(prompt))))
        arrives_at += rng.expovariate(1 / seconds_between) if seconds_between else 0.0
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            scheduler.add(coming.pop(0)[1])
        waiting = scheduler.num_waiting + sum(one.num_uncomputed_tokens > 1 for one in scheduler.running)
        chunks = scheduler.apply(scheduler.plan(pace.budget))
        shape = pace.step_time(chunks)
        prompt_tokens = sum(chunk.num_tokens for chunk in chunks if chunk.num_tokens > 1)
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
        seconds = machine.decode_seconds(num_decodes) + machine.prompt_token * prompt_tokens
        pace.observe(StepTime(shape.num_decodes, shape.prompt_work, seconds))
        now += seconds
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        scheduler.advance(chunks)
        for sequence in sampling:
            sequence.append(7)
            if sequence.num_generated_tokens == ANSWER_TOKENS:
                scheduler.remove(sequence)
        yield Step(num_decodes, prompt_tokens, waiting, seconds)


def pace_of(machine: Machine) -> Pace:
    """One that has warmed up: how decodes grow with their rows is known, and what steps take is not."""
    pace = Pace(BALANCE_TOKENS, TARGET_SECONDS)
    pace.reset(growth=machine.row / machine.step)
    return pace


def shared(steps: list[Step]) -> list[Step]:
    """Those in which a prompt made answers wait."""
    return [step for step in steps if step.num_decodes and step.prompt_tokens]


@pytest.mark.parametrize("arrivals", TOKENS_BETWEEN)
def test_on_a_large_model_a_prompt_makes_answers_wait_for_about_three_decode_steps(arrivals: str) -> None:
    """However many prompts wait. 250 ms are four decode steps of one row, and less than three of 16."""
    steps = shared(list(run(LARGE, pace_of(LARGE), TOKENS_BETWEEN[arrivals])))
    assert len(steps) > 20
    assert max(step.waiting_prompts for step in steps) > (15 if arrivals == "burst" else 1)
    for step in steps:
        assert step.seconds <= 1.05 * max(3 * LARGE.decode_seconds(step.num_decodes), 0.25)


@pytest.mark.parametrize("machine", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("arrivals", TOKENS_BETWEEN)
def test_prompts_have_most_of_the_time_while_they_wait(machine: Machine, arrivals: str) -> None:
    """At three decode steps two thirds are theirs. One step in 33 times decodes alone; the first ones learn."""
    steps = list(run(machine, pace_of(machine), TOKENS_BETWEEN[arrivals]))
    crowded = [step for step in steps if step.num_decodes and step.waiting_prompts > 1][FIRST_STEPS:]
    assert len(crowded) > 5
    of_prompts = sum(machine.prompt_token * step.prompt_tokens for step in crowded)
    assert of_prompts > 0.5 * sum(step.seconds for step in crowded)


def test_on_a_small_model_a_burst_takes_more_than_three_decode_steps_per_step() -> None:
    steps = shared(list(run(SMALL, pace_of(SMALL), 0)))
    assert max(step.seconds / SMALL.decode_seconds(step.num_decodes) for step in steps) > 2 * LEAST_RATIO
    assert max(step.seconds for step in steps) <= 1.05 * MOST_CROWD_SECONDS


decode_seconds = st.floats(0.0, 2.0)
loads = st.builds(StepLoad, st.just(2048), st.integers(0, 64), st.integers(1, 64))


@given(decode_seconds, decode_seconds, loads, st.integers(0, 64), st.booleans())
def test_slower_decodes_and_more_prompts_never_shorten_a_step(
    one: float, other: float, load: StepLoad, more: int, is_objective: bool
) -> None:
    def seconds(decode: float, num_prompts: int) -> float:
        crowd = load._replace(num_prompts=num_prompts)
        return longest_step_seconds(TARGET_SECONDS, decode, crowd, is_objective=is_objective)

    fast, slow = sorted((one, other))
    assert seconds(fast, load.num_prompts) <= seconds(slow, load.num_prompts + more)
    assert seconds(slow, load.num_prompts) >= max(TARGET_SECONDS, 3 * slow)  # two thirds are left for prompts


@pytest.mark.parametrize(
    ("decode", "num_decodes", "num_prompts", "is_objective", "expected"),
    [
        (0.010, 4, 1, False, 0.05),  # the target
        (0.030, 4, 1, False, 0.09),  # three decode steps
        (0.010, 4, 3, False, 0.075),  # 3 × (1 + 3 × 2 / 4) = 7.5 decode steps
        (0.010, 1, 64, False, 0.16),  # 16 at most
        (0.030, 1, 64, False, 0.25),  # 16 would be 0.48 s
        (0.100, 1, 64, False, 0.3),  # three are more than a quarter of a second
        (0.010, 4, 3, True, 0.05),  # somebody has asked for the target
        (0.010, 0, 64, False, 0.05),  # no answer waits, but whoever comes meanwhile
    ],
)
def test_how_long_a_step_may_last(
    decode: float, num_decodes: int, num_prompts: int, is_objective: bool, expected: float
) -> None:
    load = StepLoad(2048, num_decodes, num_prompts)
    found = longest_step_seconds(TARGET_SECONDS, decode, load, is_objective=is_objective)
    assert found == pytest.approx(expected)


def test_what_was_chosen_is_reported_with_the_measured_rates() -> None:
    assert pace_of(LARGE).chosen is None
    pace = pace_of(LARGE)
    steps = shared(list(run(LARGE, pace, 0)))
    chosen = pace.chosen
    assert chosen is not None
    assert chosen.target_itl_seconds == TARGET_SECONDS
    assert chosen.prompt_tokens_per_second == pytest.approx(1 / LARGE.prompt_token, rel=0.1)
    assert chosen.decode_step_seconds == pytest.approx(LARGE.decode_seconds(steps[-1].num_decodes), rel=0.1)
    left = chosen.longest_step_seconds - chosen.decode_step_seconds
    assert chosen.chunk_tokens == pytest.approx(left * chosen.prompt_tokens_per_second, rel=0.05)
    pace.reset()
    assert pace.chosen is None
