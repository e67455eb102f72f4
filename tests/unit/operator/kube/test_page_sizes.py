"""Pages of a listing: few objects where they are large, many where they are small."""

from __future__ import annotations

from millstream_operator.kube.client import FIRST_PAGE, LIST_PAGE, PAGE_BYTES, PageSizes


def test_pages_of_large_objects_are_about_a_megabyte() -> None:
    sizes = PageSizes(LIST_PAGE)
    assert sizes.next == FIRST_PAGE
    sizes.received(FIRST_PAGE, FIRST_PAGE * 400_000)
    assert sizes.next == PAGE_BYTES // 400_000
    sizes.received(1, 3_000_000)
    assert sizes.next == 1, "one object at least"


def test_pages_of_small_objects_are_whole_and_the_fewest_are_known() -> None:
    sizes = PageSizes(LIST_PAGE)
    sizes.received(FIRST_PAGE, FIRST_PAGE * 5_000)
    assert (sizes.next, sizes.fewest) == (LIST_PAGE, LIST_PAGE)
    sizes.received(LIST_PAGE, LIST_PAGE * 100_000)
    sizes.received(10, 50_000)
    assert (sizes.next, sizes.fewest) == (LIST_PAGE, 10)
    sizes.received(0, 100)
    assert sizes.next == LIST_PAGE, "an empty page says nothing"


def test_a_caller_with_a_smaller_limit_keeps_it() -> None:
    sizes = PageSizes(5)
    sizes.received(5, 5_000)
    assert (sizes.next, sizes.fewest) == (5, 5)
