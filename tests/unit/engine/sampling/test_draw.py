"""Drawing without sorting: what comes up is what a sorted vocabulary would give, as often."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal, localcontext
from functools import partial
from itertools import accumulate
from math import factorial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.draw import cut_nuclei, draw
from millstream_runtime.engine.sampling.redraws import draw_by_redraws, max_draws
from millstream_runtime.engine.sampling.sampler import uniform

VOCAB = 50


def weights_of(seed: int, sharpness: float, vocab_size: int = VOCAB) -> Tensor:
    """One row as `draw` wants it; every third weight has a twin, so that there are ties."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * sharpness
    logits[2::3] = logits[1::3][: len(logits[2::3])]
    return (logits - logits.max()).exp()


def kept(weights: Tensor, params: SamplingParams) -> Tensor:
    """The filters by their definitions, in float64, with a sort: `weights` with zeroes where tokens are cut."""
    left = weights.double().clone()
    left[left < params.min_p * left.max()] = 0
    if params.top_k:
        left[left < left.sort(descending=True).values[min(params.top_k, len(left)) - 1]] = 0
    above = torch.tensor([float(left[left > one].sum()) for one in left])
    left[(above >= params.top_p * left.sum()) & (above > 0)] = 0
    return left


def drawn(weights: Tensor, params: SamplingParams, count: int) -> Tensor:
    """How often each token came up in `count` draws of one batch."""
    rows = weights.repeat(count, 1)
    tokens = draw(rows, [params] * count, lambda row, attempt: uniform(7, row, attempt))
    return torch.bincount(tokens, minlength=len(weights)).double()


FILTERS = [
    SamplingParams(1, top_p=0.95),
    SamplingParams(1, top_p=0.5),
    SamplingParams(1, top_p=0.05),
    SamplingParams(1, top_p=1e-9),
    SamplingParams(1, top_k=7),
    SamplingParams(1, top_k=20, top_p=0.8),
    SamplingParams(1, top_k=10_000, top_p=0.9, min_p=0.02),
    SamplingParams(1, min_p=0.1),
    SamplingParams(1),
]


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("params", FILTERS, ids=lambda one: f"k={one.top_k},p={one.top_p},min={one.min_p}")
def test_tokens_come_up_as_often_as_a_sorted_vocabulary_says(params: SamplingParams, sharpness: float) -> None:
    weights, count = weights_of(3, sharpness), 20_000
    allowed = kept(weights, params)
    counts, expected = drawn(weights, params, count), count * allowed / allowed.sum()
    assert counts[allowed == 0].sum() == 0, "a token outside the nucleus came up"
    often = expected >= 5
    chi_square = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    assert chi_square < int(often.sum()) + 4 * (2 * int(often.sum())) ** 0.5  # mean and deviation of chi-square


@given(
    seed=st.integers(0, 10_000),
    sharpness=st.floats(0, 8),
    asked=st.lists(st.tuples(st.integers(0, 60), st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=6),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    seed: int, sharpness: float, asked: list[tuple[int, float, float]]
) -> None:
    params = [SamplingParams(1, top_k=k, top_p=p, min_p=least) for k, p, least in asked]
    rows = torch.stack([weights_of(seed + index, sharpness) for index in range(len(params))])
    together = draw(rows.clone(), params, lambda row, attempt: uniform(row, 5, attempt)).tolist()
    for index, one in enumerate(params):
        alone = draw(rows[index : index + 1].clone(), [one], lambda _, attempt, row=index: uniform(row, 5, attempt))  # type: ignore[misc]
        assert alone.item() == together[index]
        assert kept(rows[index], one)[together[index]] > 0


@given(
    seed=st.integers(0, 10_000),
    sharpness=st.floats(0, 8),
    asked=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 7, 8, 33, 60]), st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])),
        min_size=1,
        max_size=5,
    ),
)
def test_the_cut_nucleus_keeps_the_same_tokens(seed: int, sharpness: float, asked: list[tuple[int, float]]) -> None:
    """Whether by a sort or by the highest alone."""
    rows = [weights_of(seed + index, sharpness) for index in range(len(asked))]
    params = [SamplingParams(1, top_k=k, top_p=p) for k, p in asked]
    allowed = [kept(row, replace(one, top_p=1.0)) for row, one in zip(rows, params, strict=True)]
    cut = torch.stack(allowed).float()
    cut_nuclei(cut, params)
    for row, one, left, before in zip(rows, params, cut, allowed, strict=True):
        assert torch.equal(left > 0, kept(row, one) > 0) if one.top_p < 1 else torch.equal(left, before.float())


@given(seed=st.integers(0, 10_000), sharpness=st.floats(0, 8), top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.95, 1.0]))
def test_a_draw_from_a_nucleus_is_repeated_above_what_came_up(seed: int, sharpness: float, top_p: float) -> None:
    """Token for token as sums in the order of the vocabulary say, whatever is skipped on the way."""
    row, number = weights_of(seed, sharpness), partial(uniform, seed, 3)
    left = row.double().tolist()
    limit, attempt = top_p * sum(left), 0
    while True:
        target, sums = number(attempt) * sum(left), [*accumulate(left)]
        token = next(index for index, so_far in enumerate(sums) if so_far > target)
        left = [weight if weight > left[token] else 0.0 for weight in left]
        if top_p == 1 or sum(left) < limit or not sum(left):
            break
        attempt += 1
    drawn_token = draw(row[None], [SamplingParams(1, top_p=top_p)], lambda _, attempt: number(attempt))
    assert drawn_token.tolist() == [token]


@pytest.mark.parametrize("levels", [1, 2, 5, 300], ids=lambda levels: f"{levels} levels")
def test_a_seed_draws_the_same_token_on_a_gpu_as_on_a_cpu(levels: int) -> None:
    """The operations for a GPU, on a CPU: with ties, which are many of few levels, and rows with and without top-p."""
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(0, levels, (75, 40), generator=generator) * (0.5 if levels < 9 else 0.02)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    top_p = [(0.0, 1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0)[row % 7] for row in range(75)]
    on_cpu = draw(weights.clone(), [SamplingParams(1, top_p=share) for share in top_p], partial(_number_of, levels))
    assert draw_by_redraws(weights, top_p, partial(_number_of, levels)).tolist() == on_cpu.tolist()


@pytest.mark.parametrize("draws", ["on a CPU", "on a GPU"])
def test_a_token_is_refused_whose_better_ones_hold_exactly_top_p(draws: str) -> None:
    """1 + 0.5 + 0.5 = 2, of which the first alone holds 0.5 * 2."""
    weights, top_p = torch.tensor([[1.0, 0.5, 0.5]]).repeat(50, 1), [0.5] * 50
    if draws == "on a CPU":
        tokens = draw(weights, [SamplingParams(1, top_p=share) for share in top_p], partial(_number_of, 1))
    else:
        tokens = draw_by_redraws(weights, top_p, partial(_number_of, 1))
    assert tokens.tolist() == [0] * 50


def _number_of(seed: int, row: int, attempt: int) -> float:
    return uniform(seed, row, attempt)


@pytest.mark.parametrize(("top_p", "least_share"), [(0.999, "0.999"), (0.9, "0.9"), (0.5, "0.5"), (1e-9, "0.001")])
def test_the_draws_of_a_row_suffice_but_for_a_negligible_chance(top_p: float, least_share: str) -> None:
    """The fewest n with P(Poisson(ln(1 / share)) >= n) < 2 ** -53, in 60 digits.

    Of 1,000 tokens the highest has a share of 0.001 or more.
    """
    with localcontext() as context:
        context.prec = 60
        rate = -Decimal(least_share).ln()

        def refused(draws: int) -> Decimal:
            return 1 - (-rate).exp() * sum(rate**number / factorial(number) for number in range(draws))

        num_draws = max_draws(top_p, 1000)
        assert refused(num_draws) < Decimal(2) ** -53 <= refused(num_draws - 1)


def test_no_row_is_searched_for_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of top-k are, each for about as many as it asks for, and a nucleus is cut from a sorted row."""
    searched: list[tuple[int, int]] = []
    topk, sort = Tensor.topk, Tensor.sort

    def watched_topk(self: Tensor, k: int, **options: Any) -> Any:
        searched.append((len(self), k))
        return topk(self, k, **options)

    def watched_sort(self: Tensor, **options: Any) -> Any:
        searched.append((len(self), self.shape[-1]))
        return sort(self, **options)

    monkeypatch.setattr(Tensor, "topk", watched_topk)
    monkeypatch.setattr(Tensor, "sort", watched_sort)
    asked = [(0, 1.0), (0, 0.9), (2, 1.0), (2, 0.5), (30, 1.0), (10_000, 1.0)]
    params = [SamplingParams(1, top_k=k, top_p=p) for k, p in asked]
    rows = torch.stack([weights_of(seed, 2.0) for seed in range(len(params))])
    draw(rows.clone(), params, lambda row, attempt: uniform(row, 5, attempt))
    assert sorted(searched) == [(1, 32), (2, 2)]
    searched.clear()
    cut_nuclei(rows, params)
    assert sorted(searched) == [(1, 2), (1, VOCAB)]
