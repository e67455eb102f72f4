"""Which block a sequence gets: a free one while there is any, then the least recently used of the prefix cache."""

from __future__ import annotations

import random

import pytest

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.prefix_cache import extend_hashes
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence

BLOCK = 4


def sequence(number: int, tokens: list[int]) -> Sequence:
    request = Request(str(number), tokens, SamplingParams(max_tokens=1))
    return Sequence(request, number, seed=0, token_ids=list(tokens), num_prompt_tokens=len(tokens))


def run(scheduler: Scheduler, one: Sequence) -> None:
    """Compute a prompt alone, and end it."""
    scheduler.add(one)
    while one.num_uncomputed_tokens:
        scheduler.advance(scheduler.apply(scheduler.plan()))
    one.append(7)
    scheduler.remove(one)


def num_cached(blocks: BlockManager, tokens: list[int]) -> int:
    return len(blocks.match_prefix(sequence(0, [*tokens, 0])))


def test_a_conversation_keeps_its_blocks_while_others_are_free() -> None:
    blocks = BlockManager(2024, BLOCK, 1, enable_prefix_caching=True)  # one row: every request has the same home
    scheduler = Scheduler(blocks, 4096, 1)
    conversation = [5] * 30 * BLOCK
    run(scheduler, sequence(0, conversation))
    for number in range(1, 20):
        run(scheduler, sequence(number, [number + 10] * 20 * BLOCK))
        assert num_cached(blocks, conversation) == 30


def test_only_as_many_blocks_are_evicted_as_the_free_ones_lack() -> None:
    blocks = BlockManager(10, BLOCK, 1, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, 4096, 1)
    first, second = [1] * 4 * BLOCK, [2] * 4 * BLOCK
    run(scheduler, sequence(0, first))
    run(scheduler, sequence(1, second))  # two blocks are left
    run(scheduler, sequence(2, [3] * 3 * BLOCK))
    assert (num_cached(blocks, first), num_cached(blocks, second)) == (3, 4), "the tail of the older goes first"


def test_the_next_turn_makes_a_conversation_the_newest() -> None:
    blocks = BlockManager(10, BLOCK, 1, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, 4096, 1)
    first, second = [1] * 4 * BLOCK, [2] * 4 * BLOCK
    run(scheduler, sequence(0, first))
    run(scheduler, sequence(1, second))
    run(scheduler, sequence(2, [*first, 9]))
    run(scheduler, sequence(3, [3] * 4 * BLOCK))
    assert (num_cached(blocks, first), num_cached(blocks, second)) == (4, 2)


def test_a_prefix_outlives_its_tail_where_two_sequences_computed_it() -> None:
    """Answers that turn out alike are computed twice and cached once, under the blocks of the first."""
    blocks = BlockManager(12, BLOCK, 2, enable_prefix_caching=True)
    one, other = sequence(0, [1] * 8), sequence(1, [1] * 8 + [2] * 8)
    for row, member in enumerate((one, other)):
        member.row = row
        blocks.allocate(member, len(member.token_ids))
    for member in (one, other):  # both computed before either was known
        member.num_computed_tokens = len(member.token_ids)
        blocks.publish(member, len(member.token_ids))
    blocks.free(one)
    blocks.free(other)
    blocks.check_integrity([])
    taker = sequence(2, [3] * 9 * BLOCK)
    taker.row = 0
    blocks.allocate(taker, 9 * BLOCK)  # eight free ones and one evicted
    assert num_cached(blocks, [1] * 8 + [2] * 8) == 3


def test_a_request_that_finds_its_home_cached_still_gets_neighbouring_blocks() -> None:
    blocks = BlockManager(40, BLOCK, 1, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, 4096, 1)
    for number in range(20):  # the pool is full of cached blocks after the first eight
        one = sequence(number, [number] * 5 * BLOCK)
        scheduler.add(one)
        scheduler.advance(scheduler.apply(scheduler.plan()))
        assert one.blocks_are_contiguous
        one.append(7)
        scheduler.remove(one)


def test_a_pool_with_fewer_blocks_than_rows_has_no_homes() -> None:
    blocks = BlockManager(3, BLOCK, 8, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, 4096, 8)
    for number in range(3):
        run(scheduler, sequence(number, [number] * 3 * BLOCK))
        blocks.check_integrity([])


class LeastRecentlyUsed:
    """What is cached, by hash, the least recently used first: written from the rule, not from the code."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, None] = {}

    def use(self, one: Sequence) -> None:
        for block_hash in reversed(extend_hashes(one, BLOCK)[: one.num_prompt_tokens // BLOCK]):
            self.hashes.pop(block_hash, None)
            self.hashes[block_hash] = None

    def evict(self, count: int) -> None:
        for block_hash in list(self.hashes)[:count]:
            del self.hashes[block_hash]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(20))
def test_eviction_is_least_recently_used_and_never_early(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, num_rows = rng.randint(12, 60), rng.randint(1, 6)
    blocks = BlockManager(num_blocks, BLOCK, num_rows, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, 4096, num_rows)
    expected = LeastRecentlyUsed()
    known: list[list[int]] = []
    for number in range(120):
        base = rng.choice(known)[: rng.randint(1, 40)] if known and rng.random() < 0.6 else []
        tokens = [*base, *(rng.randrange(50) for _ in range(rng.randint(1, 12)))][: 10 * BLOCK]
        known.append(tokens)
        one = sequence(number, tokens)
        num_hits = len(blocks.match_prefix(one))
        num_free = num_blocks - len(expected.hashes)
        for block_hash in extend_hashes(one, BLOCK)[:num_hits]:
            expected.hashes.pop(block_hash)  # held: not a candidate
        expected.evict(max(0, -(-len(tokens) // BLOCK) - num_hits - num_free))
        run(scheduler, one)
        expected.use(one)
        blocks.check_integrity([])
        assert blocks._cache is not None
        assert {*blocks._cache._block_of} == {*expected.hashes}
