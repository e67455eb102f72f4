"""The LRU of what a replica is believed to hold."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_gateway.believed_cache import BelievedCache


def prompt(conversation: int, length: int) -> tuple[int, ...]:
    return tuple(conversation * 1000 + index for index in range(length))


class NaiveCache:
    """The same by the definition: each use moves all chunks to the newest end, the first chunk last."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.order = capacity, list[int]()

    def use(self, chunks: Sequence[int]) -> None:
        self.order = [one for one in self.order if one not in chunks] + [*reversed(chunks)]
        self.order = self.order[-self.capacity :]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=40), st.integers(1, 30))
def test_it_holds_what_the_definition_holds(uses: list[tuple[int, int]], capacity: int) -> None:
    cache, naive = BelievedCache(capacity), NaiveCache(capacity)
    for number, (conversation, length) in enumerate(uses, 1):
        chunks = prompt(conversation, length)
        in_order = [chunk in naive.order for chunk in chunks]
        held = in_order.index(False) if False in in_order else length
        assert cache.held_chunks(chunks) == held
        assert in_order == [True] * held + [False] * (length - held)  # prefix-closed
        cache.use(chunks, number)
        naive.use(chunks)
        assert len(cache) == len(naive.order)


def test_a_smaller_capacity_evicts_the_oldest_and_of_it_the_end() -> None:
    cache = BelievedCache(100)
    cache.use(prompt(1, 10), 1)
    cache.use(prompt(2, 10), 2)
    cache.resize(14)
    assert (cache.held_chunks(prompt(1, 10)), cache.held_chunks(prompt(2, 10))) == (4, 10)


def test_what_others_sent_takes_room() -> None:
    cache = BelievedCache(20)
    cache.use(prompt(1, 10), 1)
    cache.fill(15, 1)
    assert cache.held_chunks(prompt(1, 10)) == 5
    cache.fill(10**9, 2)  # a report that lies costs no more memory than the cache has
    assert len(cache) == 20
