"""What the event loop counts looks on the page of /metrics as prometheus_client's own would."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from millstream_runtime.server.operations.instruments import LoopCounter, LoopHistogram, RecentMean

LABELS = {"model_name": 'a "name"', "engine": "0"}
BOUNDS = (0.001, 0.5, 1.0, 20.0, 500000.0)


def page(registry: CollectorRegistry) -> str:
    """Without the moments of creation, which differ."""
    return re.sub(r"(_created\{.*\}) .*", r"\1 then", generate_latest(registry).decode())


@given(st.lists(st.sampled_from([0.0, *BOUNDS, 0.7, 1e9]) | st.floats(0, 1e6)))
def test_a_histogram_reads_as_the_librarys(values: list[float]) -> None:
    registry, expected = CollectorRegistry(), CollectorRegistry()
    histogram = LoopHistogram("vllm:seconds", "Help", LABELS, BOUNDS)
    registry.register(histogram)
    library = Histogram("vllm:seconds", "Help", [*LABELS], buckets=BOUNDS, registry=expected).labels(**LABELS)
    for value in values:
        histogram.observe(value)
        library.observe(value)
    assert page(registry) == page(expected)


@given(st.lists(st.integers(0, 1 << 20)))
def test_a_counter_reads_as_the_librarys(amounts: list[int]) -> None:
    registry, expected = CollectorRegistry(), CollectorRegistry()
    counter = LoopCounter("vllm:tokens", "Help", LABELS)
    registry.register(counter)
    library = Counter("vllm:tokens", "Help", [*LABELS], registry=expected).labels(**LABELS)
    for amount in amounts:
        counter.inc(amount)
        library.inc(amount)
    assert page(registry) == page(expected)


def test_the_librarys_switch_for_created_series_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_DISABLE_CREATED_SERIES", "true")
    registry = CollectorRegistry()
    registry.register(LoopCounter("vllm:tokens", "Help", LABELS))
    registry.register(LoopHistogram("vllm:seconds", "Help", LABELS, BOUNDS))
    assert "_created" not in page(registry)


def test_a_recent_mean_follows_what_is_observed_and_keeps_it_while_nothing_is() -> None:
    histogram = LoopHistogram("vllm:seconds", "Help", LABELS, BOUNDS)
    histogram.observe(100.0)  # before anybody asks for the mean of what comes
    mean = RecentMean(histogram)
    mean.end_round()
    unmeasured = mean.value
    assert unmeasured is None
    for value in (1.0, 2.0, 3.0):
        histogram.observe(value)
    mean.end_round()
    assert mean.value == 2.0
    for _ in range(1000):
        mean.end_round()
    assert mean.value == 2.0
    for _ in range(40):
        histogram.observe(10.0)
        mean.end_round()
    assert mean.value == pytest.approx(10.0, rel=0.1)
