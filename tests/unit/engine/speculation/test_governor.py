"""The governor: which drafts are checked, when it stops, what it tries, and that trials stay within their budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.governor_simulator import DEMO_NGRAM, ONE_CALL, Costs, Phase, even, simulate
from millstream_runtime.engine.speculation.acceptance import Acceptance
from millstream_runtime.engine.speculation.goodput import best_goodput
from millstream_runtime.engine.speculation.governor import Governor
from millstream_runtime.engine.speculation.reading_worth import Reading

MOST = 4
RIGHT, WRONG = [True] * 400, [False] * 400


def run_one(governor: Governor, answers: dict[str, float], seconds: Callable[[int], float], steps: int) -> list[int]:
    """Steps of the same requests, of each of which all drafts stand or fall; return how many each step checked."""
    found = []
    for _ in range(steps):
        lengths = governor.choose(dict.fromkeys(answers, MOST), len(answers), is_crowded=False)
        tokens = len(answers)
        for one, rate in answers.items():
            length = lengths.get(one, MOST)
            accepted = round(rate * length)
            governor.observe_drafts(one, length, accepted)
            tokens += accepted if one in lengths else 0
        num_drafts = sum(lengths.values())
        governor.observe_step(len(answers), num_drafts, tokens, seconds(num_drafts))
        found.append(num_drafts)
    return found


@given(
    st.integers(1, 6),
    st.lists(st.floats(0, 1), max_size=24),
    st.lists(st.floats(1e-3, 1), min_size=5, max_size=5),
)
def test_no_number_of_drafts_has_a_higher_goodput(num_decodes: int, marginals: list[float], costs: list[float]) -> None:
    likeliest = sorted(marginals, reverse=True)[: 4 * num_decodes]

    def seconds(num_drafts: int) -> float:
        low, part = divmod(num_drafts, num_decodes)
        high = min(low + 1, 4)
        return costs[low] + (costs[high] - costs[low]) * part / num_decodes

    best = best_goodput(num_decodes, likeliest, costs)
    for num_drafts in range(len(likeliest) + 1):
        goodput = (num_decodes + sum(likeliest[:num_drafts])) / seconds(num_drafts)
        assert best.tokens_per_second >= goodput * (1 - 1e-9)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.integers(0, 4)), max_size=60))
def test_a_draft_is_never_likelier_than_the_one_before_it(checks: list[tuple[str, int, int]]) -> None:
    acceptance = Acceptance(4)
    for request, num_drafts, accepted in checks:
        acceptance.observe(request, num_drafts, min(num_drafts, accepted))
    for request in "abc":
        marginals = acceptance.marginals(request)
        assert 0 <= marginals[-1] <= marginals[0] <= 1
        assert marginals == sorted(marginals, reverse=True)


def test_a_new_request_begins_as_those_before_it() -> None:
    acceptance = Acceptance(4)
    for number in range(20):
        acceptance.observe(number, 4, 4)
    assert acceptance.marginals("new")[3] > 0.8
    acceptance.observe("creative", 4, 0)
    acceptance.observe("creative", 4, 0)
    acceptance.observe("creative", 4, 0)
    assert acceptance.marginals("creative")[0] < 0.6 < acceptance.marginals("other")[0]


def test_prompts_that_a_trial_makes_a_draft_model_read_are_a_loss() -> None:
    governor = Governor(MOST, compares_unchecked=False)
    run_one(governor, {"a": 0.0}, lambda drafts: 1.0 + drafts, 2000)
    began, lost = governor.stats().decode_seconds, governor.stats().exploration_seconds
    trials = 0
    for _ in range(1000):
        if governor.choose({"a": MOST}, 1, is_crowded=False):
            governor.observe_reading(5.0)
            trials += 1
        else:
            governor.observe_step(1, 0, 1, 1.0)
    found = governor.stats()
    assert found.exploration_seconds - lost == pytest.approx(trials * 5.0)
    assert trials > 0
    assert found.decode_seconds - began == pytest.approx(1000 + 4 * trials)
    assert found.exploration_seconds <= 0.011 * found.decode_seconds


def test_a_request_drafts_where_that_saves_what_reading_it_takes() -> None:
    """Two requests of 40 tokens: a token takes 5 ms without drafts and 1.8 with, so drafts save 0.128 s of each."""
    governor = Governor(MOST, compares_unchecked=False)
    run_one(governor, {"a": 1.0, "b": 1.0}, lambda drafts: 0.01 + 0.001 * drafts, 300)

    def chosen(a: float, b: float) -> list[frozenset[str]]:
        """Which requests draft, in the steps that are no trials. `a`, `b`: seconds that reading takes."""
        reading = {"a": Reading(a, 40), "b": Reading(b, 40)}
        found = []
        for _ in range(100):
            lengths = governor.choose({"a": MOST, "b": MOST}, 2, is_crowded=False, reading=reading.__getitem__)
            if governor._trial is None:
                found.append(frozenset(lengths))
            num_drafts = sum(lengths.values())
            governor.observe_step(2, num_drafts, 2 + num_drafts, 0.01 + num_drafts / 1000)
        assert 90 <= len(found) <= 100, "the others are trials"
        return found

    both, none = frozenset("ab"), frozenset[str]()
    assert {*chosen(0.0, 0.0)} == {both}
    assert {*chosen(0.09, 0.09)} == {both}
    assert {*chosen(0.12, 0.12)} == {none}, "six steps pass meanwhile, whose tokens have no drafts"
    assert {*chosen(0.01, 0.2)} == {both}, "what the first saves is spent on the second"
    assert {*chosen(0.14, 0.14)} == {none}
    assert {*chosen(0.01, 0.5)} == {frozenset("a")}


def test_nothing_is_read_for_a_batch_that_will_not_draft_when_it_is_complete() -> None:
    """Drafts gain for one request, and lose for 16. Reading them takes a step, and pays for one alone."""
    governor = Governor(MOST, compares_unchecked=False)

    def seconds(num_decodes: int, num_drafts: int) -> float:
        return 0.01 + (0.001 if num_decodes == 1 else 0.004) * num_drafts

    for num_decodes in (1, 16):
        for num_drafts in (0, num_decodes, 4 * num_decodes):
            for _ in range(8):
                governor.observe_costs(num_decodes, num_drafts, seconds(num_decodes, num_drafts))
    unread = Reading(0.01, 60)
    governor.explores = False
    for num_coming, drafts in ((0, True), (15, False), (0, True)):
        chosen = governor.choose({"a": 4}, 1, is_crowded=False, reading=lambda one: unread, num_coming=num_coming)
        assert bool(chosen) is drafts, num_coming
    read = Reading(0.0, 60)
    assert governor.choose({"a": 4}, 1, is_crowded=False, reading=lambda one: read, num_coming=15), "it is read already"


def test_short_answers_are_expected_to_end_among_their_drafts() -> None:
    """Two drafts that always stand pay for long answers, and do not where every second token is the last."""
    governor = Governor(MOST, compares_unchecked=False)
    for num_drafts in (0, 1, MOST):
        for _ in range(8):
            governor.observe_costs(1, num_drafts, 0.01 + 0.0055 * num_drafts)
    governor.explores = False
    for answer_tokens, drafts in ((1000.0, True), (2.0, False)):
        reading = partial(_always, Reading(0.0, 100, answer_tokens))
        chosen = governor.choose({"a": 2}, 1, is_crowded=False, reading=reading)
        assert bool(chosen) is drafts, answer_tokens


def test_it_drafts_where_that_pays_and_not_where_it_does_not() -> None:
    pays = run_one(Governor(MOST), {"a": 1.0}, lambda drafts: 0.01 + 0.001 * drafts, 300)
    assert pays[100:].count(MOST) >= 190  # the others are trials
    loses = run_one(Governor(MOST), {"a": 0.0}, lambda drafts: 0.01 + 0.008 * drafts, 300)
    assert sum(map(bool, loses)) <= 3


def test_a_batch_size_that_was_not_timed_stands_in_for_no_other() -> None:
    costs, rng = (
        Costs(base_ms=10, decode_ms=0, check_ms=0, row_ms=0.5, more_checks_ms=0, noise=0, slow_share=0),
        random.Random(1),
    )
    governor = Governor(MOST)
    for size in (1, 4):
        for length in (0, MOST, 1) * 5:
            governor.observe_costs(size, size * length, costs.seconds(size, [length] * size, rng))
    governor.choose(dict.fromkeys("abc", MOST), 3, is_crowded=False)  # and then one of them ends
    run = simulate([Phase(2, [even(0.6, rng), even(0.6, rng)])], governor, costs, MOST)
    assert sum(num_drafts > 0 for *_, num_drafts in run.timeline[8:40]) >= 28


def test_one_that_is_hard_to_guess_stops_alone() -> None:
    governor = Governor(MOST)
    answers = {"a": 1.0, "b": 1.0, "creative": 0.0}
    run_one(governor, answers, lambda drafts: 0.01 + 0.001 * drafts, 300)
    chosen = [governor.choose(dict.fromkeys(answers, MOST), 3, is_crowded=False) for _ in range(2)]
    assert {"a": MOST, "b": MOST} in chosen  # one of them may be a trial


def test_nothing_drafts_before_requests_are_refused() -> None:
    governor = Governor(MOST)
    run_one(governor, {"a": 1.0}, lambda drafts: 0.01, 300)
    assert {"a": MOST} in [governor.choose({"a": MOST}, 1, is_crowded=False) for _ in range(2)]
    assert governor.choose({"a": MOST}, 1, is_crowded=True) == {}


def test_a_gain_that_is_hardly_there_flips_nothing() -> None:
    governor = Governor(MOST)
    noise = iter(range(10_000))
    # Five tokens for five times a step, a little more or less from step to step.
    run_one(governor, {"a": 1.0}, lambda drafts: 0.01 * (1 + drafts) * (0.995 + 0.01 * (next(noise) % 2)), 2000)
    assert governor.stats().flips <= 2


def _always(reading: Reading, _: int) -> Reading:
    return reading


@pytest.mark.parametrize("seconds", [0.0, 1e-12])
def test_a_clock_that_is_too_coarse_for_a_step_ends_no_engine(seconds: float) -> None:
    governor = Governor(MOST, compares_unchecked=False)
    for number in range(300):
        proposed, reads = dict.fromkeys(range(number, number + 3), MOST), Reading(0.0, float(number % 2))
        lengths = governor.choose(proposed, 3, is_crowded=False, reading=partial(_always, reads))
        for one, length in lengths.items():
            governor.observe_drafts(one, length, length)
        governor.observe_step(3, sum(lengths.values()), 3 + sum(lengths.values()), seconds)
        governor.forget(number)
    assert governor.stats().exploration_seconds < 1e-3


def test_equal_observations_lead_to_equal_choices() -> None:
    phases = [Phase(3, [RIGHT, WRONG, RIGHT, WRONG])]
    first, second = (simulate(phases, Governor(MOST), DEMO_NGRAM, MOST).timeline for _ in range(2))
    assert first == second


def test_nothing_is_left_of_requests_that_have_ended() -> None:
    governor = Governor(MOST, compares_unchecked=False)
    simulate([Phase(4, [RIGHT, WRONG] * 8)], governor, DEMO_NGRAM, MOST, compares_unchecked=False)
    assert not governor._unseen_steps
    assert not governor._acceptance._requests


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=4),
    st.sampled_from([DEMO_NGRAM, ONE_CALL, Costs(draft_ms=0.48)]),
    st.integers(1, 8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_trials_lose_at_most_one_percent(
    rates: list[float], costs: Costs, concurrency: int, compares_unchecked: bool, rng: random.Random
) -> None:
    governor = Governor(MOST, compares_unchecked=compares_unchecked)
    phases = [Phase(concurrency, [even(rate, rng, 200) for _ in range(concurrency)]) for rate in rates]
    run = simulate(phases, governor, costs, MOST, compares_unchecked=compares_unchecked)
    stats = governor.stats()
    assert stats.decode_seconds == pytest.approx(run.seconds)
    assert sum(one.tokens for one in stats.by_length) == run.tokens
    # On top of the budget comes what the last trial lost beyond what was expected of it.
    slowest = max(after[0] - before[0] for before, after in zip(run.timeline, run.timeline[1:], strict=False))
    assert stats.exploration_seconds <= 0.01 * run.seconds + slowest
