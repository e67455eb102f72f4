"""Buckets: the smallest that holds a step, little padding, and a bound on what a step may copy."""

from __future__ import annotations

import pytest

from millstream_runtime.engine.execution.graphs.buckets import LEAST_WIDTH_BLOCKS, Bucket, Buckets

UNBOUNDED = 1 << 40


@pytest.mark.parametrize("max_rows", [1, 2, 5, 64, 100, 256])
@pytest.mark.parametrize("max_width", [1, 4, 7, 128, 2000])
def test_every_step_gets_the_smallest_bucket_that_holds_it(max_rows: int, max_width: int) -> None:
    buckets = Buckets(max_rows, max_width, UNBOUNDED)
    everything = list(buckets)
    for rows in {1, max_rows // 3 or 1, max_rows}:
        for width in {1, max_width // 3 or 1, max_width}:
            bucket = buckets.holding(rows, width)
            assert bucket in everything
            smaller = [one for one in everything if one.rows >= rows and one.width_blocks >= width]
            assert bucket == min(smaller, key=lambda one: (one.rows, one.width_blocks))


def test_at_most_a_third_of_the_rows_is_padding() -> None:
    buckets = Buckets(256, 128, UNBOUNDED)
    assert buckets.rows == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    for rows in range(1, 257):
        bucket = buckets.holding(rows, 1)
        assert bucket is not None
        assert 3 * (bucket.rows - rows) < bucket.rows


def test_what_is_too_large_has_no_bucket() -> None:
    buckets = Buckets(8, 64, most_cells=256)
    assert buckets.holding(8, 32) == Bucket(8, 32)
    assert buckets.holding(8, 33) is None
    assert buckets.holding(9, 1) is None
    assert buckets.holding(1, 65) is None
    assert max(one.cells for one in buckets) == 256
    assert Buckets(1, 100, most_cells=LEAST_WIDTH_BLOCKS - 1).largest is None


def test_the_largest_is_recorded_first_and_then_one_request_at_every_length() -> None:
    ordered = Buckets(8, 20, UNBOUNDED).to_record()
    assert ordered[:5] == [Bucket(8, 20), Bucket(1, 20), Bucket(1, 16), Bucket(1, 8), Bucket(1, 4)]
    assert ordered[5:7] == [Bucket(2, 20), Bucket(2, 16)]
    assert Buckets(1, 4, UNBOUNDED).to_record() == [Bucket(1, 4)]
    assert Buckets(4, 4, most_cells=1).to_record() == []


@pytest.mark.parametrize("in_place", [False, True])
def test_every_bucket_that_a_step_can_have_is_recorded_once(in_place: bool) -> None:
    buckets = Buckets(48, 20, most_cells=256, in_place=in_place)
    ordered = buckets.to_record()
    assert len(set(ordered)) == len(ordered)
    held = {
        buckets.holding(rows, width, contiguous=contiguous)
        for rows in range(1, 49)
        for width in range(1, 21)
        for contiguous in (False, True)
    }
    assert {one for one in held if one is not None} == {*ordered}
