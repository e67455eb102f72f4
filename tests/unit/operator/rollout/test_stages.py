"""Stages of a shift: none is skipped, no replica is missed, and it ends, whatever fails and is scaled meanwhile."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_operator.rollout.traffic_shift.stages import Shift, begin, next_shift, scaled, stages


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (100, [1, 25, 50, 100])],
)
def test_the_stages_are_one_pod_and_the_shares(replicas: int, expected: list[int]) -> None:
    assert stages(replicas) == expected


def test_a_stage_waits_for_its_pods_and_for_its_comparison() -> None:
    assert next_shift(Shift(2, 8), new=2, new_ready=1, passed=True) == Shift(2, 8), "one is not ready"
    assert next_shift(Shift(2, 8), new=1, new_ready=1, passed=True) == Shift(2, 8), "one is not there"
    assert next_shift(Shift(2, 8), new=2, new_ready=2, passed=False) == Shift(2, 8), "25 % are not compared"
    assert next_shift(Shift(2, 8), new=2, new_ready=2, passed=True) == Shift(3, 8)
    assert next_shift(Shift(3, 8), new=3, new_ready=3, passed=False) == Shift(4, 8), "on the way to 50 %"
    assert next_shift(Shift(8, 8), new=8, new_ready=8, passed=True) is None


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_another_number_of_replicas_never_enlarges_the_share(held: int, replicas: int, wanted: int) -> None:
    shift = Shift(min(held, replicas), replicas)
    after = scaled(shift, wanted)
    assert 1 <= after.held <= wanted
    assert after.held == 1 or after.held * replicas <= shift.held * wanted


class Controller:
    """The Deployment controller's rules of a held rollout, on counts: maxSurge 1, maxUnavailable held - 1.

    New pods are ready and never available; an old pod that is not ready goes before one that is.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas, self.old, self.old_ready, self.new, self.new_ready = replicas, replicas, replicas, 0, 0

    @property
    def ready(self) -> int:
        return self.old_ready + self.new_ready

    def hold(self, held: int) -> None:
        if self.old > (least := self.replicas - (held - 1)):
            gone = self.old - least
            self.old -= gone
            self.old_ready = min(self.old_ready, self.old)
        self.new += max(0, min(self.replicas - self.new, self.replicas + 1 - self.old - self.new))


@given(st.integers(2, 24), st.integers(0, 1 << 30))
def test_no_replica_is_missed_no_stage_is_skipped_and_it_ends(replicas: int, seed: int) -> None:
    """Pods start one by one, and fail and recover at random for a while."""
    chance = random.Random(seed)
    world, shift, compared = Controller(replicas), begin(replicas), []
    for turn in range(40 * replicas):
        before = world.ready
        world.hold(shift.held)
        assert world.ready >= min(before, replicas), "an old replica went that was missed"
        assert world.old + world.new <= replicas + 1
        calm = turn > 20 * replicas
        if world.new_ready < world.new and (calm or chance.random() < 0.7):
            world.new_ready += 1
        elif not calm and chance.random() < 0.2:
            world.new_ready -= world.new_ready > 0
        elif world.old_ready < world.old:
            world.old_ready += 1
        elif not calm and chance.random() < 0.2:
            world.old_ready -= world.old_ready > 0
        passed = chance.random() < 0.5
        after = next_shift(shift, world.new, world.new_ready, passed=passed)
        if after != shift and shift.is_settled:
            assert passed, "a stage ends only when it was compared"
            assert world.new_ready == shift.held, "with all its pods ready"
            compared.append(shift.held)
        if after is None:
            break
        assert after.held - shift.held in (0, 1)
        shift = after
    assert compared == list(stages(replicas)), "every stage, in order, to the end"


@pytest.mark.parametrize(
    ("held", "replicas", "percent"),
    [(1, 2, 50), (2, 2, 100), (1, 4, 25), (2, 4, 50), (3, 4, 100), (1, 8, 0), (2, 8, 25), (3, 8, 50), (40, 40, 100)],
)
def test_the_percent_names_the_stage_whatever_the_number_of_replicas(held: int, replicas: int, percent: int) -> None:
    assert Shift(held, replicas).percent == percent


def test_replicas_that_change_never_lead_to_a_stage_of_a_smaller_percent_that_begins_anew() -> None:
    """Four and eight replicas by turns: the percent grows at most, until it is that of both."""
    shift = begin(4)
    seen = []
    for replicas in (8, 4) * 4:
        shift = scaled(shift, replicas)
        seen.append(shift.percent)
    assert seen == [25] * 8
