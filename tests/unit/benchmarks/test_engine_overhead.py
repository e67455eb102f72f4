"""The case of checks in `benchmarks.engine_overhead`, on a tiny model: its drafts stand, and both sides are timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import engine_overhead
from millstream_runtime.engine.request import SamplingParams
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_checks_add_is_the_difference_outside_the_model(tmp_path: Path, temperature: float) -> None:
    sampling = SamplingParams(120, temperature, seed=1, ignore_eos=True)
    found = engine_overhead.measure_checks(write_tiny_model(tmp_path / "tiny"), sampling, acceptance=1.0)
    assert found["steps"] >= 10
    assert found["tokens_per_check"] > 4, "of five, since the drafts are the answers"
    assert 0 < found["outside_milliseconds"] < found["step_milliseconds"]
    assert 0 < found["outside_with_checks_milliseconds"] < found["step_with_checks_milliseconds"]
    added = found["outside_with_checks_milliseconds"] - found["outside_milliseconds"]
    assert found["added_share"] == pytest.approx(added / found["step_with_checks_milliseconds"], abs=0.01)
