"""Drawing without sorting: what comes up is what a sorted vocabulary would give, as often."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from millstream_runtime.engine.request import SamplingParams
from millstream_runtime.engine.sampling.draw import cut_top_p, draw
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


@given(seed=st.integers(0, 10_000), sharpness=st.floats(0, 8), top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999]))
def test_the_sort_for_gpus_keeps_the_same_tokens(seed: int, sharpness: float, top_p: float) -> None:
    row = weights_of(seed, sharpness)
    cut = torch.stack([row, row])
    cut_top_p(cut, [top_p, 1.0])
    assert torch.equal(cut[0] > 0, kept(row, SamplingParams(1, top_p=top_p)) > 0)
    assert torch.equal(cut[1], row)
