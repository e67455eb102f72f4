"""The governor against the best fixed length, which is known only afterwards: over drift, load steps and mixtures."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.governor import MOST, RESULT, SETTINGS, govern, measure_recorded
from benchmarks.governor_simulator import (
    BUSY_DRAFT,
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
from benchmarks.recorded_steps import RecordedSteps, read
from millstream_runtime.engine.scheduling.step_plan import MOST_STEP_DRAFTS
from millstream_runtime.engine.speculation.governor import Governor

pytestmark = pytest.mark.deep

MOST_LONG = 8
MOST_REGRET, LEAST_OVER_OFF, LEAST_OF_ONE_RUN = 0.03, 0.97, 0.95
NAMES = [
    "creative at 1",
    "chat at 4",
    "mixture at 1",
    "one creative among chats",
    "load steps",
    "flips",
]
SCENARIOS = scenarios()
SAVED = {(one["setting"], one["scenario"]): one for one in json.loads(RESULT.read_text(encoding="utf-8"))["results"]}


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


@pytest.mark.matrix("setting")
@pytest.mark.parametrize(("setting", "name"), [(setting, name) for setting in SETTINGS for name in SCENARIOS])
def test_behind_the_warm_up_no_fixed_length_is_much_better(setting: str, name: str) -> None:
    """All scenarios of the saved results, which have the fixed lengths: those are the same on any machine."""
    saved = SAVED[setting, name]
    costs, compares_unchecked = SETTINGS[setting]
    run, governor = govern(SCENARIOS[name], costs, MOST, compares_unchecked=compares_unchecked)
    assert run.seconds == pytest.approx(saved["governor_seconds"], rel=0.01), (
        "run `python -m benchmarks.governor --save`"
    )
    assert run.seconds <= (1 + MOST_REGRET) * min(saved[f"fixed_{length}_seconds"] for length in range(MOST + 1))
    assert governor.stats().exploration_seconds <= 0.01 * run.seconds


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_it_finds_long_drafts_though_steps_vary_by_a_third(batch: int) -> None:
    """A machine with other work, from the first request behind the warm-up on."""
    took = best = 0.0
    for seed in (1, 2):
        rng = random.Random(seed)
        phases = [Phase(batch, answers(["own text"], 8 + 3 * batch, rng))]
        governor = Governor(MOST_LONG, compares_unchecked=False)
        for size in (1, 4, 16):
            most = min(MOST_LONG, MOST_STEP_DRAFTS // size)
            for length in (0, most, 1) * 5:
                seconds = BUSY_DRAFT.seconds(size, [length] * size if length else [], rng)
                governor.observe_costs(size, size * length, seconds)
        run = simulate(phases, governor, BUSY_DRAFT, MOST_LONG, compares_unchecked=False, seed=seed)
        fixed = [simulate(phases, Fixed(length), BUSY_DRAFT, MOST_LONG).seconds for length in (0, 1, 4, MOST_LONG)]
        took, best = took + run.seconds, best + min(fixed)
        assert governor.stats().exploration_seconds <= 0.01 * run.seconds
    assert best >= 0.9 * took


@pytest.mark.parametrize("recorded", read(), ids=lambda one: one.name)
def test_with_recorded_steps_of_a_machine_with_other_work_it_is_near_the_best_length(recorded: RecordedSteps) -> None:
    found = [measure_recorded(recorded, seed) for seed in (1, 2, 3)]
    assert sum(one["regret"] for one in found) / len(found) <= MOST_REGRET
    assert all(one["exploration_share"] <= 0.012 for one in found)


@pytest.mark.parametrize(
    ("name", "reading_milliseconds"),
    [("draft model at 1", 40), *(("draft model at 4", reading) for reading in (20, 40, 60, 160))],
)
def test_what_a_draft_model_takes_to_read_prompts_is_a_price_of_its_drafts(
    name: str, reading_milliseconds: int
) -> None:
    """Each step with drafts may be the faster one, and the answers take longer all the same."""
    (recorded,) = (one for one in read() if one.name == name)
    found = [measure_recorded(recorded, seed, reading_milliseconds / 1000)["speedup_over_off"] for seed in (1, 2, 3)]
    assert sum(found) / len(found) >= LEAST_OVER_OFF
    assert min(found) >= LEAST_OF_ONE_RUN
    if reading_milliseconds <= 20:
        assert min(found) > 1.2, "drafts of four requests pay where prompts are short"


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
