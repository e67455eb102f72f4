"""The meter of the event loop gives the percentiles of all its samples, and takes no memory per sample."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from benchmarks.stalling_server import LagMeter

pytestmark = pytest.mark.deep

ALLOWED_BYTES = 100_000  # 10 ms in hundredths of a millisecond, in a dict


async def test_percentiles_are_those_of_all_samples_and_samples_take_no_memory() -> None:
    random_numbers = random.Random(1)
    meter, lags = LagMeter(), [random_numbers.expovariate(2000) for _ in range(20_000)]
    tracemalloc.start()
    for lag in lags:
        meter.add(lag, 1.0)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < ALLOWED_BYTES
    ranked, found = sorted(lags), meter.summary()
    assert found["samples"] == len(lags)
    for label, position in (("p50", 10_000), ("p99", 19_800), ("p99.9", 19_980), ("max", 19_999)):
        for name in ("lag", "work"):
            assert found[f"{name}_{label}_milliseconds"] == round(ranked[position] * 1e3, 2)
