"""Percentiles, token gaps and goodput against answers worked out by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millstream.bench.measure import Distribution, Objective, RequestRecord, measure, percentile
from millstream_runtime.errors import InvalidConfigError


def record(index: int, due: float, sent: float, chunks: list[float], tokens: int, prompt: int = 10) -> RequestRecord:
    return RequestRecord(index, due, sent, chunks, chunks[-1], prompt, tokens)


# Due at 1.0, sent half a second late, text at 2.0, 2.1, 2.1 and 2.4 for eight counted tokens.
LATE = record(0, 1.0, 1.5, [2.0, 2.1, 2.1, 2.4], 8)
QUICK = record(1, 2.0, 2.0, [2.05], 1)


def test_latency_counts_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    assert LATE.ttft_seconds == pytest.approx(1.0)
    assert LATE.e2e_seconds == pytest.approx(1.4)
    assert LATE.client_delay_seconds == pytest.approx(0.5)


def test_itl_is_between_chunks_and_tpot_between_counted_tokens() -> None:
    assert LATE.itl_seconds == pytest.approx([0.1, 0.0, 0.3])
    assert LATE.tpot_seconds == pytest.approx(0.4 / 7)
    assert QUICK.itl_seconds == []
    assert QUICK.tpot_seconds is None


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [([7.0], 99, 7.0), ([1.0, 2.0], 50, 1.5), ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 4.6), ([1.0, 9.0], 0, 1.0)],
)
def test_percentiles_by_hand(samples: list[float], percent: float, expected: float) -> None:
    assert percentile(samples, percent) == pytest.approx(expected)


def test_percentiles_agree_with_numpy() -> None:
    rng = random.Random(1)
    for count in (1, 2, 3, 10, 257):
        samples = sorted(rng.expovariate(1.0) for _ in range(count))
        found = Distribution.of(samples)
        assert found.mean == pytest.approx(float(np.mean(samples)))
        for percent, value in found.percentiles.items():
            assert value == pytest.approx(float(np.percentile(samples, percent)))


def test_a_percentile_of_nothing_is_an_error_and_a_distribution_of_nothing_is_empty() -> None:
    with pytest.raises(ValueError, match="samples"):
        percentile([], 50)
    assert Distribution.of([]).count == 0


def test_throughput_counts_only_complete_requests_over_the_whole_run() -> None:
    failed = RequestRecord(2, 0.5, 0.5, end_seconds=4.5, error="The endpoint answered 429.")
    unfinished = RequestRecord(3, 4.0, 4.0, [4.2])
    measured = measure([LATE, QUICK, failed, unfinished])
    assert (measured.completed, measured.failed, measured.unfinished) == (2, 1, 1)
    assert measured.duration_seconds == pytest.approx(4.0)  # 0.5, the first due, to 4.5, the last end
    assert measured.requests_per_second == pytest.approx(0.5)
    assert measured.output_tokens_per_second == pytest.approx(9 / 4)
    assert measured.total_tokens_per_second == pytest.approx(29 / 4)
    assert measured.tokens_per_chunk == pytest.approx(9 / 5)
    assert measured.good is None


def test_nothing_measured_is_zeros_not_a_crash() -> None:
    measured = measure([], Objective.parse("ttft_ms:1"))
    assert (measured.completed, measured.requests_per_second, measured.goodput_requests_per_second) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        ("ttft_ms:1000.1", {0, 1}),
        ("ttft_ms:999", {1}),
        ("itl_ms:300", {0, 1}),  # one token has no gap to be late in
        ("itl_ms:200", {1}),  # the 99th percentile of the request's own gaps is 0.296
        ("tpot_ms:58,e2e_ms:1401", {0, 1}),
        ("tpot_ms:57", {1}),
        ("ttft_ms:2000,e2e_ms:1399", {1}),
        ("ttft_ms:49", set()),
    ],
)
def test_goodput_wants_every_limit_met(objective: str, good: set[int]) -> None:
    parsed = Objective.parse(objective)
    assert {r.index for r in (LATE, QUICK) if parsed.met_by(r)} == good


def test_a_failed_request_is_never_good() -> None:
    failed = RequestRecord(0, 0.0, 0.0, [0.1], 0.1, 1, 1, error="cut")
    assert measure([failed], Objective.parse("e2e_ms:1000")).good == 0


@pytest.mark.parametrize("text", ["", "ttft_ms", "ttft_ms:", "ttft:3", "ttft_ms:0", "ttft_ms:nan", "itl_ms:1,itl_ms:2"])
def test_a_wrong_objective_names_the_part(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="--goodput has"):
        Objective.parse(text)
