"""Rejection sampling: whatever drafts are drawn from, the tokens are distributed as the target draws them.

A table stands for each model: the logits of the first token, and of the second behind each first one. Requests draft
both tokens, or the second alone behind a first that did not stand, with the numbers that an engine uses.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from millstream_runtime.config import AcceptanceRule
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.sampling.sampler import SamplingRow, sample
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.draft_choice import Drawn
from tests.support.drafting_engines import MakeDrafting
from tests.support.drafting_engines import counts as counts_of
from tests.support.engines import MakeEngine, WriteModel, generate, greedy

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
VOCABULARY, NUM_REQUESTS, MOST_Z = 4, 30_000, 2.0
PLAIN = SamplingParams(8)
Pair = tuple[int, int]


class Tables(NamedTuple):
    """`first` `[V]` and `second` `[V, V]`: logits of the second token behind each first one."""

    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Case:
    """`draft_columns`: of the draft model's vocabulary. `sharpness`: of its logits; 0 is a draft that knows nothing."""

    params: SamplingParams
    draft_columns: int = VOCABULARY
    sharpness: float = 1.0


CASES = {
    "temperature 1, a bias that the draft does not know": Case(replace(PLAIN, logit_bias=((1, 1.5), (3, -1.0)))),
    "temperature 0.5, a draft that knows nothing": Case(replace(PLAIN, temperature=0.5), sharpness=0.0),
    "temperature 1.5, top-k 3, a smaller vocabulary of drafts": Case(replace(PLAIN, temperature=1.5, top_k=3), 3),
    "top-p 0.9, min-p 0.1, a larger one": Case(replace(PLAIN, min_p=0.1, top_p=0.9), 7),
}


def tables(case: Case) -> tuple[Tables, Tables]:
    """Of the target and of the draft."""
    generator = torch.Generator().manual_seed(11)
    target = Tables(*(torch.randn(shape, generator=generator) for shape in ((VOCABULARY,), (VOCABULARY, VOCABULARY))))
    draft = []
    for table in target:
        noise = torch.randn((*table.shape[:-1], case.draft_columns), generator=generator)
        known = min(VOCABULARY, case.draft_columns)
        noise[..., :known] += table[..., :known]
        draft.append(noise * case.sharpness)
    return target, Tables(*draft)


def exact(logits: Tensor, params: SamplingParams) -> list[float]:
    """What a token of these logits is drawn from: softmax, then min-p, top-k, top-p, in plain Python."""
    bias = dict(params.logit_bias)
    scaled = [(one + bias.get(token, 0.0)) / params.temperature for token, one in enumerate(logits.tolist())]
    weights = [math.exp(one - max(scaled)) for one in scaled]
    weights = [one if one >= params.min_p else 0.0 for one in weights]
    ranked = sorted(weights, reverse=True)
    if params.top_k:
        weights = [one if one >= ranked[params.top_k - 1] else 0.0 for one in weights]
        ranked = sorted(weights, reverse=True)
    before = [0.0, *itertools.accumulate(ranked)]
    last = min(one for one, sum_before in zip(ranked, before, strict=False) if sum_before < params.top_p * sum(weights))
    kept = [one if one >= last else 0.0 for one in weights]
    return [one / sum(kept) for one in kept]


def drafted(choice: Drawn, logits: Tensor, sequences: list[Sequence], num_drafts: int) -> list[int]:
    return choice.choose(logits.clone(), [(one, num_drafts) for one in sequences])


def settled(logits: Tensor, sequences: list[Sequence], num_drafts: int) -> list[int]:
    """The tokens that the target's sampler gives behind `num_drafts` drafts."""
    rows = [
        SamplingRow(one.request.sampling, one.seed, len(one.token_ids) + num_drafts, proposal=one.proposals[num_drafts])
        for one in sequences
    ]
    return sample(logits.clone(), rows).tolist()


class DrawnPairs(NamedTuple):
    """What all requests drew: their pairs of tokens, and how many first drafts stood."""

    pairs: Counter[Pair]
    num_stood: int


@cache
def draw_pairs(case: Case) -> DrawnPairs:
    """Both tokens of each request: a check of two drafts; where the first falls, another check of one."""
    target, draft = tables(case)
    choice = Drawn(VOCABULARY)
    request = Request("0", [0], case.params)
    sequences = [Sequence(request, 0, seed, [0], 1) for seed in range(NUM_REQUESTS)]
    d1 = drafted(choice, draft.first.expand(NUM_REQUESTS, -1), sequences, 0)
    drafted(choice, draft.second[d1], sequences, 1)
    t1 = settled(target.first.expand(NUM_REQUESTS, -1), sequences, 0)
    t2 = settled(target.second[d1], sequences, 1)
    fallen = [index for index in range(NUM_REQUESTS) if t1[index] != d1[index]]
    again = [sequences[index] for index in fallen]
    first = [t1[index] for index in fallen]
    choice.begin()
    assert not again[0].proposals
    for one, token_id in zip(again, first, strict=True):
        one.append(token_id)
    drafted(choice, draft.second[first], again, 0)
    for index, token_id in zip(fallen, settled(target.second[first], again, 0), strict=True):
        t2[index] = token_id
    return DrawnPairs(Counter(zip(t1, t2, strict=True)), NUM_REQUESTS - len(fallen))


def marginal(found: dict[Pair, float], place: int) -> list[float]:
    """Of the first or the second token."""
    sums = [0.0] * VOCABULARY
    for pair, one in found.items():
        sums[pair[place]] += one
    return sums


def chi_square_z(counts: list[float], probabilities: list[float]) -> float:
    """How many standard deviations the chi-square statistic is from its mean (Wilson and Hilferty 1931)."""
    possible = [(count, NUM_REQUESTS * p) for count, p in zip(counts, probabilities, strict=True) if p > 0]
    statistic = sum((count - expected) ** 2 / expected for count, expected in possible)
    freedom = len(possible) - 1
    spread = 2 / (9 * freedom)
    return (math.cbrt(statistic / freedom) - (1 - spread)) / math.sqrt(spread)


def total_variation(counts: list[float], probabilities: list[float]) -> float:
    return sum(abs(count / NUM_REQUESTS - p) for count, p in zip(counts, probabilities, strict=True)) / 2


def expected_pairs(case: Case) -> dict[Pair, float]:
    target, _ = tables(case)
    first = exact(target.first, case.params)
    second = [exact(row, case.params) for row in target.second]
    return {(one, two): first[one] * second[one][two] for one in range(VOCABULARY) for two in range(VOCABULARY)}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_both_tokens_are_distributed_as_the_target_draws_them(name: str) -> None:
    case = CASES[name]
    expected, found = expected_pairs(case), draw_pairs(case)
    counts = {pair: float(found.pairs[pair]) for pair in expected}
    assert all(expected[pair] > 0 for pair in found.pairs), "no token that a filter removes comes up"
    assert chi_square_z([*counts.values()], [*expected.values()]) < MOST_Z
    for place in (0, 1):
        seen, p = marginal(counts, place), marginal(expected, place)
        assert chi_square_z(seen, p) < MOST_Z
        assert total_variation(seen, p) < 0.01
        # One percent of the requests with the second most likely token in place of the first would be seen.
        best, second = sorted(range(VOCABULARY), key=lambda token: -p[token])[:2]
        p[best], p[second] = p[best] - 0.01, p[second] + 0.01
        assert chi_square_z(seen, p) > MOST_Z


@pytest.mark.parametrize("name", CASES)
def test_a_draft_stands_with_the_sum_of_the_smaller_probabilities(name: str) -> None:
    case = CASES[name]
    target, draft = tables(case)
    p = exact(target.first, case.params)
    q = exact(draft.first[:VOCABULARY], replace(case.params, logit_bias=()))
    stands = sum(min(one, other) for one, other in itertools.zip_longest(p, q, fillvalue=0.0))
    deviation = math.sqrt(NUM_REQUESTS * stands * (1 - stands))
    assert draw_pairs(case).num_stood == pytest.approx(NUM_REQUESTS * stands, abs=3 * deviation)


def test_a_token_does_not_depend_on_its_batch() -> None:
    target, draft = tables(next(iter(CASES.values())))
    answers = []
    for batch in (8, 1):
        choice, found = Drawn(VOCABULARY), []
        sequences = [Sequence(Request("0", [0], PLAIN), 0, seed, [0], 1) for seed in range(8)]
        for first in range(0, 8, batch):
            some = sequences[first : first + batch]
            drafted(choice, draft.first.expand(len(some), -1), some, 0)
            found += settled(target.first.expand(len(some), -1), some, 0)
        answers.append(found)
    assert answers[0] == answers[1]


def test_drafts_that_are_drawn_stand_where_the_most_probable_ones_do_not(
    drafted: MakeDrafting, write_model: WriteModel
) -> None:
    """With p equal to q each drawn draft stands; the most probable token of a flat distribution seldom does."""
    sampled = SamplingParams(30, temperature=1.0, ignore_eos=True, top_p=0.95)
    requests = [Request(str(index), [9, 6, index], sampled) for index in range(4)]
    shares = {}
    for rule in AcceptanceRule:
        engine = drafted(write_model(), max_draft_tokens=4, speculation_acceptance=rule)
        assert [len(answer) for answer in generate(engine, requests).values()] == [30] * 4
        found = counts_of(engine)
        shares[rule] = found.num_accepted_tokens / found.num_draft_tokens
    assert shares[AcceptanceRule.DISTRIBUTION] > 0.99
    assert shares[AcceptanceRule.IDENTITY] < 0.5


def test_seeded_and_greedy_requests_have_the_tokens_that_they_have_without_drafts(
    drafted: MakeDrafting, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    """Also in company of a request whose drafts are drawn."""
    seeded = SamplingParams(24, temperature=0.9, top_k=20, seed=5, ignore_eos=True)
    requests = [Request("seeded", [9, 6, 7], seeded), Request("greedy", [9, 6, 8], greedy(24))]
    expected = generate(make_engine(write_model()), requests)
    penalised = SamplingParams(24, presence_penalty=0.5, min_tokens=10, logit_bias=((5, 1.0),), logprobs=1)
    found = generate(
        drafted(write_model(), max_draft_tokens=4, speculation_acceptance=AcceptanceRule.DISTRIBUTION),
        [*requests, Request("drawn", [9, 6, 9], penalised)],
    )
    assert {name: found[name] for name in expected} == expected
    assert len(found["drawn"]) >= 10
