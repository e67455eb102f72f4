"""What one replica concludes from the Lease: when it may write, when it may take over, and when it must look first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from millstream_operator.leadership.election import Election, LeaseRecord, ObservedLease, Read, Timing, Wait, Write

WALL = "2026-01-01T00:00:00.000000Z"
TIMING = Timing()


def election(identity: str = "me") -> Election:
    return Election(identity, TIMING, random.Random(0))


def held(by: str = "other", version: str = "1", **fields: object) -> ObservedLease:
    return ObservedLease(replace(LeaseRecord(by, 15, WALL, WALL, 3), **fields), version)  # type: ignore[arg-type]


def leader(now: float = 0.0) -> Election:
    """Leads since `now`, with the Lease at version 1."""
    one = election()
    one.record_read(None, now)
    step = one.next(now, WALL)
    assert isinstance(step, Write)
    one.record_write(ObservedLease(step.record, "1"), now, now)
    return one


def test_a_leaders_last_write_is_over_before_another_may_take_over() -> None:
    longest_write = TIMING.write_timeout_seconds
    assert TIMING.renew_deadline_seconds + longest_write + TIMING.margin_seconds <= TIMING.lease_duration_seconds
    assert TIMING.request_timeout_seconds < TIMING.renew_deadline_seconds < TIMING.lease_duration_seconds
    worst_takeover = TIMING.retry_seconds + TIMING.lease_duration_seconds + TIMING.request_timeout_seconds
    assert worst_takeover <= 20


@pytest.mark.parametrize(
    "times",
    [
        {"lease_duration_seconds": 11},  # no time for a write
        {"margin_seconds": 0.0},
        {"renew_deadline_seconds": 14.5},
        {"request_timeout_seconds": 9.0},  # one try and no more
        {"retry_seconds": 9.0},
    ],
)
def test_times_with_which_two_could_write_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Timing(**times)  # type: ignore[arg-type]


def test_the_first_one_looks_and_creates() -> None:
    one = election()
    assert one.next(0.0, WALL) == Read()
    one.record_read(None, 1.0)
    step = one.next(1.0, WALL)
    assert step == Write(LeaseRecord("me", 15, WALL, WALL, 0), None)
    assert not one.leading(1.0), "only what was answered counts"
    one.record_write(ObservedLease(step.record, "1"), 1.0, 1.5)
    assert one.leading(1.5)
    assert (one.write_until, one.over_by, one.term) == (11.0, 15.0, 1)


def test_a_held_lease_is_taken_when_it_has_not_changed_for_its_duration() -> None:
    """By our own clock: the record's own times lie, and are not used."""
    one = election()
    one.record_read(held(renew_time="1999-01-01T00:00:00Z"), 100.0)
    now = 100.0
    while now < 115.0:
        step = one.next(now, WALL)
        assert not isinstance(step, Write)
        if isinstance(step, Read):
            one.record_read(held(renew_time="1999-01-01T00:00:00Z"), now)
        else:
            assert now < step.until <= 115.0
            now = step.until
    step = one.next(115.0, WALL)
    assert isinstance(step, Write)
    assert (step.version, step.record.holder, step.record.transitions) == ("1", "me", 4)


def test_each_change_of_the_record_begins_the_wait_anew() -> None:
    one = election()
    for second in range(0, 100, 10):
        one.record_read(held(version=str(second)), float(second))
    assert not isinstance(one.next(104.9, WALL), Write)
    one.record_read(held(version="90"), 104.9)
    assert isinstance(one.next(105.0, WALL), Write)


def test_a_released_lease_is_taken_at_once_and_an_emptied_one_is_not() -> None:
    """Somebody who clears the holder by hand does not stop the holder."""
    one = election()
    one.record_read(held("", duration_seconds=1), 0.0)
    assert isinstance(one.next(0.0, WALL), Write)
    two = election()
    two.record_read(held(""), 0.0)
    assert not isinstance(two.next(1.0, WALL), Write)
    assert not isinstance(two.next(14.9, WALL), Write)


def test_a_deleted_lease_is_not_free_before_the_old_one_has_run_out() -> None:
    one = election()
    one.record_read(held(), 0.0)
    one.record_read(None, 2.0)
    assert not isinstance(one.next(14.9, WALL), Write)
    one.record_read(None, 15.0)
    step = one.next(15.0, WALL)
    assert isinstance(step, Write)
    assert step.version is None


def test_a_leader_whose_lease_is_deleted_creates_it_again() -> None:
    one = leader()
    one.record_failure(2.0)
    one.record_read(None, 3.0)
    step = one.next(3.0, WALL)
    assert isinstance(step, Write)
    assert step.version is None
    assert one.leading(3.0)


@pytest.mark.parametrize(("duration", "respected"), [(5, 15.0), (15, 15.0), (40, 40.0), (86_400, 60.0)])
def test_a_longer_lease_is_respected_and_an_absurd_one_is_not(duration: int, respected: float) -> None:
    one = election()
    one.record_read(held(duration_seconds=duration), 0.0)
    one.record_read(held(duration_seconds=duration), respected - 0.1)
    assert not isinstance(one.next(respected - 0.1, WALL), Write)
    assert isinstance(one.next(respected, WALL), Write)


def test_a_leader_renews_long_before_its_deadline() -> None:
    one = leader()
    step = one.next(0.0, WALL)
    assert isinstance(step, Wait)
    assert step.until <= TIMING.retry_seconds
    renewal = one.next(step.until, "later")
    assert isinstance(renewal, Write)
    assert (renewal.record.renew_time, renewal.record.acquire_time, renewal.record.transitions) == ("later", WALL, 0)
    one.record_write(ObservedLease(renewal.record, "2"), step.until, step.until + 0.1)
    assert one.write_until == step.until + 10.0
    assert one.term == 1


def test_a_leader_stops_by_itself_at_its_deadline() -> None:
    one = leader()
    assert one.leading(9.9)
    assert not one.leading(10.0)


def test_a_lost_answer_counts_for_nothing_until_it_was_looked_for_and_written_again() -> None:
    one = leader()
    one.record_failure(5.0)
    assert isinstance(one.next(5.0, WALL), Wait)
    assert one.next(6.0, WALL) == Read()
    one.record_read(held("me", version="2"), 6.2)
    assert one.write_until == 10.0, "the renewal that arrived after all is not counted"
    step = one.next(6.2, WALL)
    assert isinstance(step, Write)
    assert step.version == "2"


def test_who_sees_another_holder_stops_at_once() -> None:
    one = leader()
    one.record_read(held(version="2"), 3.0)
    assert not one.leading(3.0)
    assert not isinstance(one.next(3.0, WALL), Write)


def test_a_conflict_is_looked_into_at_once() -> None:
    one = leader()
    one.record_conflict(3.0)
    assert one.next(3.0, WALL) == Read()


def test_who_was_cut_off_and_comes_back_first_begins_a_new_term() -> None:
    one = leader()
    one.record_failure(9.0)
    assert not one.leading(20.0)
    one.record_read(held("me"), 20.0)
    step = one.next(20.0, WALL)
    assert isinstance(step, Write)
    one.record_write(ObservedLease(step.record, "2"), 20.0, 20.1)
    assert one.leading(20.1)
    assert one.term == 2, "another may have written meanwhile: everything is looked at again"


def test_a_write_that_changed_nothing_is_no_renewal() -> None:
    """With a wall clock that stands still the record would be the same, so no other replica could see the renewal."""
    one = leader()
    one.record_write(ObservedLease(LeaseRecord("me", 15, WALL, WALL, 0), "1"), 5.0, 5.1)
    assert one.write_until == 10.0


def test_a_released_lease_says_so_and_the_leader_no_longer_leads() -> None:
    one = leader()
    step = one.release("end")
    assert step is not None
    assert (step.version, step.record.holder, step.record.released) == ("1", "", True)
    assert not one.leading(0.1)
    assert election().release("end") is None
