"""Figures against sums by hand, and intervals against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.slice_figures import by_slice, figures_of
from millstream_runtime.quality.token_scores import DocumentScores

pytestmark = pytest.mark.deep


def scores(kl: list[float], slice_name: str = "all", **columns: list[float]) -> DocumentScores:
    """A document of so many tokens; columns that are not given are those of two equal models."""
    zeros = [0.0] * len(kl)
    return DocumentScores(
        TokenizedDocument(1, slice_name, [0] * (len(kl) + 1), 1, False),
        np.array(kl),
        np.array(columns.get("base", zeros)),
        np.array(columns.get("candidate", zeros)),
        np.array(columns.get("agrees", [1.0] * len(kl)), dtype=bool),
        np.array(columns.get("flips", zeros), dtype=bool),
    )


def test_tokens_count_alike_whatever_document_they_are_of() -> None:
    found = figures_of(
        "all",
        [
            scores([0.1], base=[1.0], candidate=[1.5], agrees=[0], flips=[1]),
            scores([0.3, 0.2, 0.0], base=[2.0, 0.0, 1.0], candidate=[2.0, 0.5, 1.0], flips=[0, 1, 0]),
        ],
    )
    assert (found.num_documents, found.num_tokens) == (2, 4)
    assert found.mean_kl.value == pytest.approx(0.15)
    assert found.p99_kl.value == pytest.approx(0.3)
    assert found.top1_agreement_percent.value == pytest.approx(75)
    assert found.flip_percent.value == pytest.approx(50)
    assert found.base_perplexity == pytest.approx(math.exp(1))
    assert found.perplexity_ratio.value == pytest.approx(math.exp(0.25))


def test_the_tail_is_the_smallest_value_that_99_percent_of_tokens_do_not_exceed() -> None:
    found = figures_of("all", [scores([float(one)]) for one in range(1, 101)])
    assert found.p99_kl.value == 99


def test_a_number_that_is_not_finite_is_counted_and_spoils_no_other_figure() -> None:
    found = figures_of("all", [scores([math.nan, 0.2]), scores([0.4], candidate=[math.inf]), scores([0.4])])
    assert found.num_not_finite == 2
    assert found.mean_kl.value == pytest.approx(0.3)


def test_a_slice_of_nothing_finite_has_figures_all_the_same() -> None:
    found = figures_of("all", [scores([math.nan]), scores([math.nan])])
    assert found.num_not_finite == found.num_tokens == 2
    assert found.mean_kl.value == 0


def test_a_model_that_is_thousands_of_nats_off_has_a_perplexity_that_json_can_hold() -> None:
    found = figures_of("all", [scores([5000.0], candidate=[5000.0]), scores([4000.0], candidate=[4000.0])])
    assert math.isfinite(found.candidate_perplexity)
    assert math.isfinite(found.perplexity_ratio.high)
    assert found.perplexity_ratio.value > 1e300


def test_slices_are_apart_and_in_the_order_of_the_data() -> None:
    found = by_slice([scores([0.2], "code"), scores([0.1], "chat"), scores([0.4], "code")])
    assert [(one.slice, one.num_documents) for one in found] == [("code", 2), ("chat", 1)]


def test_intervals_hold_the_true_mean_about_as_often_as_they_say() -> None:
    """Documents whose tokens depend on each other: intervals over tokens would be far too narrow."""
    draw = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        documents = [scores((draw.exponential(1.0) * np.ones(20)).tolist()) for _ in range(60)]
        figure = figures_of("all", documents).mean_kl
        assert figure.low <= figure.value <= figure.high
        hits += figure.low <= 1.0 <= figure.high
    assert 170 <= hits <= 200  # 190 are promised; for a skewed distribution the bootstrap gives somewhat fewer


def test_the_same_scores_and_seed_give_the_same_intervals() -> None:
    documents = [scores([one / 10, one / 20]) for one in range(30)]
    assert figures_of("all", documents, 4) == figures_of("all", documents, 4)
    assert figures_of("all", documents, 4) != figures_of("all", documents, 5)
