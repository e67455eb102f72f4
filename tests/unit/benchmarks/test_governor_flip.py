"""When a flip counts as followed."""

from __future__ import annotations

import pytest

from benchmarks.governor_flip import AGAIN, RANDOM, Phase, Step, report, seconds_to_follow

pytestmark = pytest.mark.deep


def steps(*lengths: float) -> list[Step]:
    return [Step(0.5, 1, 8.0, length) for length in lengths]


def test_a_flip_is_followed_once_the_length_stays_with_the_new_workload() -> None:
    assert seconds_to_follow(steps(6, 6, 0, 0, 0), before=6, after=0) == 1.0
    assert seconds_to_follow(steps(6, 0, 0, 6, 0, 0), before=6, after=0) == 2.0, "it went back once"
    assert seconds_to_follow(steps(0, 0, 0, 4, 6), before=0, after=6) == 1.5
    assert seconds_to_follow(steps(6, 6), before=0, after=6) == 0.0
    assert seconds_to_follow(steps(6, 6, 6), before=6, after=0) == 1.5, "never: the whole phase"


def test_a_single_step_of_the_old_length_within_a_window_is_no_way_back() -> None:
    short = [Step(0.05, 1, 8.0, 0.0)] * 20
    trial = [*short, Step(0.05, 1, 8.0, 6.0), *short]
    assert seconds_to_follow(trial, before=6, after=0) == 0.0


def test_the_report_has_every_flip_and_refuses_workloads_that_do_not_differ() -> None:
    phases = [Phase(AGAIN, steps(6, 6, 6, 6)), Phase(RANDOM, steps(6, 0, 0, 0)), Phase(AGAIN, steps(0, 0, 6, 6))]
    found = report(1, phases)
    assert found["flips"] == [{"to": RANDOM, "seconds": 0.5}, {"to": AGAIN, "seconds": 1.0}]
    assert (found["median_seconds"], found["slowest_seconds"]) == (0.75, 1.0)
    assert found["workloads"][RANDOM]["checked_drafts_per_decode"] == 0.0
    with pytest.raises(SystemExit, match="same length"):
        report(1, [Phase(AGAIN, steps(1, 1)), Phase(RANDOM, steps(1, 1))])
