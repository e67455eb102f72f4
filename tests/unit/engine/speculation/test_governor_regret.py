"""The governor against the best fixed length, which is known only afterwards: over drift, load steps and mixtures."""

from __future__ import annotations

import random

import pytest

from benchmarks.governor_simulator import (
    DEMO_DRAFT,
    DEMO_NGRAM,
    ONE_CALL,
    Costs,
    Fixed,
    Phase,
    answers,
    scenarios,
    simulate,
)
from millstream_runtime.engine.speculation.governor import Governor

MOST = 4
MOST_REGRET = 0.03
NAMES = [
    "creative at 1",
    "chat at 4",
    "mixture at 1",
    "one creative among chats",
    "load steps",
    "flips",
]
SCENARIOS = scenarios()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("costs", "compares_unchecked"),
    [pytest.param(DEMO_NGRAM, True, id="n-grams"), pytest.param(DEMO_DRAFT, False, id="draft model")],
)
def test_no_fixed_length_is_much_better(name: str, costs: Costs, compares_unchecked: bool) -> None:
    phases = SCENARIOS[name]
    fixed = [simulate(phases, Fixed(length), costs, MOST).seconds for length in (0, 1, 2, MOST)]
    governor = Governor(MOST, compares_unchecked=compares_unchecked)
    run = simulate(phases, governor, costs, MOST, compares_unchecked=compares_unchecked)
    assert run.seconds <= (1 + MOST_REGRET) * min(fixed)
    assert governor.stats().exploration_seconds <= 0.01 * run.seconds


@pytest.mark.parametrize("first", ["creative", "own text"])
@pytest.mark.parametrize(
    ("costs", "compares_unchecked"),
    [
        pytest.param(DEMO_NGRAM, True, id="n-grams"),
        pytest.param(DEMO_DRAFT, False, id="draft model"),
        pytest.param(ONE_CALL, True, id="n-grams on a larger model"),
    ],
)
def test_a_flip_of_the_workload_is_followed_within_five_seconds(
    first: str, costs: Costs, compares_unchecked: bool
) -> None:
    second = {"creative": "own text", "own text": "creative"}[first]
    rng = random.Random(3)
    phases = [Phase(1, answers([kind], 100, rng)) for kind in (first, second)]
    governor = Governor(MOST, compares_unchecked=compares_unchecked)
    run = simulate(phases, governor, costs, MOST, compares_unchecked=compares_unchecked)
    began = run.phase_began_at_seconds[1]
    seconds, tokens = next((at, so_far) for at, so_far, _ in run.timeline if at > began + 5)
    goodput = (run.tokens - tokens) / (run.seconds - seconds)
    fixed = [simulate(phases[1:], Fixed(length), costs, MOST) for length in (0, 1, MOST)]
    assert goodput >= 0.95 * max(one.tokens / one.seconds for one in fixed)
