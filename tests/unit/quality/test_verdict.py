"""Limits by workload and by the user, and the least data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.slice_figures import Figure, SliceFigures
from millstream_runtime.quality.verdict import Workload, check_enough, judge

SAME = SliceFigures(
    "chat", 100, 9000, 0, 5.0, 5.0, Figure(0, 0, 0), Figure(0, 0, 0), Figure(100, 100, 100), Figure(0, 0, 0),
    Figure(1, 1, 1),
)  # fmt: skip


def test_the_same_model_passes_every_workload() -> None:
    for workload in Workload:
        verdict = judge(SAME, workload, {})
        assert verdict.passes
        assert not verdict.unsure


@pytest.mark.parametrize(
    ("field", "general", "beyond"),
    [
        ("mean_kl", 0.04, 0.06),
        ("p99_kl", 0.9, 1.1),
        ("top1_agreement_percent", 96, 94),
        ("flip_percent", 2.9, 3.1),
        ("perplexity_ratio", 1.029, 1.031),
    ],
)
def test_each_figure_has_a_limit_and_code_and_math_have_stricter_ones(
    field: str, general: float, beyond: float
) -> None:
    def figures(value: float, name: str = "chat") -> SliceFigures:
        changes: dict[str, Any] = {field: Figure(value, value, value)}
        return replace(SAME, slice=name, **changes)

    assert judge(figures(general), None, {}).passes
    [failure] = judge(figures(beyond), None, {}).failures
    assert failure.startswith(f"{field} {beyond:.4g} ")
    for name in ("code", "math"):
        assert not judge(figures(general, name), None, {}).passes
        assert judge(figures(general, name), Workload.GENERAL, {}).passes


def test_a_limit_of_the_users_own_replaces_that_one_alone() -> None:
    worse = replace(SAME, mean_kl=Figure(0.2, 0.2, 0.2), flip_percent=Figure(9, 9, 9))
    verdict = judge(worse, None, {"max_mean_kl": 0.3})
    assert [one.split()[0] for one in verdict.failures] == ["flip_percent"]


def test_an_interval_beyond_the_limit_passes_and_says_so() -> None:
    verdict = judge(replace(SAME, mean_kl=Figure(0.04, 0.02, 0.06)), None, {})
    assert verdict.passes
    assert verdict.unsure == ("mean_kl 0.04 (0.02 to 0.06), limit 0.05",)


def test_one_token_that_is_not_finite_fails() -> None:
    [failure] = judge(replace(SAME, num_not_finite=1), None, {}).failures
    assert failure == "1 of 9000 tokens have logits that are not finite"


def test_a_figure_that_is_no_number_fails() -> None:
    nan = float("nan")
    assert not judge(replace(SAME, mean_kl=Figure(nan, nan, nan)), None, {}).passes


def test_too_little_data_names_the_slice_and_the_least() -> None:
    def documents(count: int, tokens: int, name: str) -> list[TokenizedDocument]:
        return [TokenizedDocument(1, name, [0] * (tokens + 1), 1, False)] * count

    check_enough(documents(20, 50, "code"))
    with pytest.raises(InvalidConfigError, match=r"Slice 'math' has 19 documents with 950 tokens .* 20 documents"):
        check_enough([*documents(20, 50, "code"), *documents(19, 50, "math")])
    with pytest.raises(InvalidConfigError, match=r"30 documents with 300 tokens .* 1000 tokens per slice"):
        check_enough(documents(30, 10, "all"))
