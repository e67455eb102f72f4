"""Who asks what and when is decided before the run, the same on every machine."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from millstream.bench.workload import (
    PlannedRequest,
    Range,
    TokenIdPrompts,
    WordPrompts,
    WorkloadSpec,
    fingerprint,
    plan,
    poisson_arrivals,
    read_trace,
)
from millstream_runtime.errors import InvalidConfigError


def test_poisson_arrivals_are_exponential_gaps_of_the_right_mean_from_second_zero() -> None:
    times = poisson_arrivals(rate=8.0, count=20_001, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert times[0] == 0.0
    assert min(gaps) >= 0
    assert mean == pytest.approx(1 / 8, rel=0.03)  # four standard errors at 20,000 gaps
    assert spread == pytest.approx(1 / 8, rel=0.05)  # an exponential's deviation is its mean
    # P(gap > 2 means) of an exponential is e^-2.
    assert sum(gap > 2 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), abs=0.01)


def test_a_seed_gives_the_same_arrivals_everywhere() -> None:
    assert poisson_arrivals(2.0, 4, seed=0) == pytest.approx([0.0, 0.920057, 1.390480, 2.062579], abs=1e-6)
    assert poisson_arrivals(2.0, 4, seed=1) != poisson_arrivals(2.0, 4, seed=0)


def test_an_infinite_rate_means_all_at_once() -> None:
    assert poisson_arrivals(math.inf, 3, seed=0) == [0.0, 0.0, 0.0]


def test_the_rate_changes_when_requests_come_but_not_what_they_are() -> None:
    slow, fast = (plan(WorkloadSpec(request_rate=rate, input_tokens=Range(5, 90))) for rate in (1.0, 50.0))
    assert len(slow) == 100
    assert [request.input_tokens for request in slow] == [request.input_tokens for request in fast]
    assert slow[-1].arrival_seconds == pytest.approx(50 * (fast[-1].arrival_seconds or 0))


def test_lengths_stay_within_their_ranges_and_use_them() -> None:
    spec = WorkloadSpec(concurrency=2, num_requests=500, input_tokens=Range(3, 9), output_tokens=Range(7, 7))
    requests = plan(spec)
    assert {request.input_tokens for request in requests} == set(range(3, 10))
    assert {request.output_tokens for request in requests} == {7}
    assert {request.arrival_seconds for request in requests} == {None}  # a closed loop has no schedule


def test_token_id_prompts_have_the_exact_length_the_shared_prefix_and_nothing_else_in_common() -> None:
    maker = TokenIdPrompts(Range(10, 4000), seed=5, shared_prefix_tokens=64)
    first, second = maker.make(0, 200), maker.make(1, 130)
    assert (len(first), len(second)) == (200, 130)
    assert first[:64] == second[:64]
    assert first[64:130] != second[64:130]
    assert first == maker.make(0, 200)
    assert min(first + second) >= 10
    assert max(first + second) <= 4000


def test_word_prompts_hit_the_length_that_the_endpoint_was_measured_to_count() -> None:
    # An endpoint that counts 1.5 tokens a word and 20 for its template.
    maker = WordPrompts.calibrated((32, 68), (160, 260), seed=0, shared_prefix_tokens=30)
    first, second = maker.make(0, 320).split(), maker.make(1, 320).split()
    assert len(first) == 200  # (320 - 20) / 1.5
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]


def test_a_trace_is_sorted_and_starts_at_its_earliest_line() -> None:
    lines = [
        '{"timestamp_seconds": 105.5, "input_tokens": 7, "output_tokens": 3}\n',
        "\n",
        '{"timestamp_seconds": 100, "prompt": "Hello", "output_tokens": 9}\n',
    ]
    assert read_trace(lines, "t.jsonl") == [
        PlannedRequest(0, 0.0, None, 9, "Hello"),
        PlannedRequest(1, 5.5, 7, 3),
    ]
    assert len(read_trace(lines, "t.jsonl", num_requests=1)) == 1


GOOD_LINE = '{"timestamp_seconds": 0, "input_tokens": 7, "output_tokens": 3}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "t.jsonl line 2 is not JSON."),
        ("[1]", "t.jsonl line 2 is not a JSON object."),
        ('{"input_tokens": 7, "output_tokens": 3}', "line 2: timestamp_seconds is None"),
        ('{"timestamp_seconds": -1, "input_tokens": 7, "output_tokens": 3}', "line 2: timestamp_seconds is -1"),
        ('{"timestamp_seconds": NaN, "input_tokens": 7, "output_tokens": 3}', "line 2: timestamp_seconds is nan"),
        ('{"timestamp_seconds": 1, "input_tokens": 0, "output_tokens": 3}', "line 2: input_tokens is 0"),
        ('{"timestamp_seconds": 1, "input_tokens": 7, "output_tokens": true}', "line 2: output_tokens is True"),
        ('{"timestamp_seconds": 1, "output_tokens": 3}', "(or give a prompt)"),
        ('{"timestamp_seconds": 1, "prompt": "", "output_tokens": 3}', "line 2: prompt must be"),
        ("[" * 100_000, "t.jsonl line 2 is not JSON."),
        (f'{{"timestamp_seconds": 1{"0" * 400}, "input_tokens": 7, "output_tokens": 3}}', "line 2: timestamp_seconds"),
        ('{"timestamp_seconds": 1, "prompt": "\\ud83d", "output_tokens": 3}', "line 2: prompt has half of a surrogate"),
    ],
)
def test_a_wrong_trace_line_is_named_by_its_number(line: str, said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        read_trace([GOOD_LINE, line], "t.jsonl")
    assert said in caught.value.message


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="is empty"):
        read_trace(["\n", ""], "t.jsonl")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "Give one of"),
        ({"request_rate": 1.0, "concurrency": 2}, "Give one of"),
        ({"request_rate": 0.0}, "--request-rate is 0.0"),
        ({"request_rate": -2.0}, "--request-rate is -2.0"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"concurrency": 2, "num_requests": 0}, "--num-requests is 0"),
        ({"concurrency": 2, "shared_prefix_tokens": 128}, "--shared-prefix-tokens is 128"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_the_name_of_its_flag(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        WorkloadSpec(**fields)
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["", "x", "0", "9:3", "-4", "1.5", "1:2:3"])
def test_a_range_is_a_number_or_two(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="--input-tokens"):
        Range.parse("--input-tokens", text, 1)


def test_equal_loads_have_equal_fingerprints_and_others_do_not() -> None:
    base = WorkloadSpec(request_rate=4.0, num_requests=10)
    assert fingerprint(plan(base)) == fingerprint(plan(WorkloadSpec(request_rate=4.0, num_requests=10)))
    others: list[dict[str, Any]] = [{"seed": 1}, {"num_requests": 11}, {"output_tokens": Range(127, 127)}]
    for other in others:
        changed = WorkloadSpec(**{"request_rate": 4.0, "num_requests": 10, **other})
        assert fingerprint(plan(changed)) != fingerprint(plan(base))
