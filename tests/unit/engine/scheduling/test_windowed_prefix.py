"""Blocks that a sliding window has passed are freed, and a cached prefix needs only those within it.

Where all layers have a window there is one block table; where full layers are among them, one per group of layers.
"""

from __future__ import annotations

import random

import pytest

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.hybrid_block_manager import HybridBlockManager, make_block_manager
from millstream_runtime.engine.scheduling.prefix_cache import extend_hashes
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence

BLOCK, WINDOW, CHUNK = 4, 10, 16
Windows = tuple[int | None, ...]
WINDOWED: Windows = (WINDOW,)
MIXED: Windows = (WINDOW, None)


def sequence(number: int, tokens: list[int]) -> Sequence:
    request = Request(str(number), tokens, SamplingParams(max_tokens=1))
    return Sequence(request, number, seed=0, token_ids=list(tokens), num_prompt_tokens=len(tokens))


def pool(
    num_blocks: int, num_rows: int = 2, windows: Windows = WINDOWED, chunk: int = CHUNK
) -> tuple[BlockManager, Scheduler]:
    blocks = make_block_manager(
        windows, num_blocks, BLOCK, num_rows, lookahead_tokens=chunk, enable_prefix_caching=True
    )
    return blocks, Scheduler(blocks, chunk, num_rows)


def hybrid_pool(num_blocks: int, num_rows: int = 2) -> tuple[HybridBlockManager, Scheduler]:
    blocks, scheduler = pool(num_blocks, num_rows, MIXED)
    assert isinstance(blocks, HybridBlockManager)
    return blocks, scheduler


def run(blocks: BlockManager, scheduler: Scheduler, one: Sequence) -> None:
    scheduler.add(one)
    while one.num_uncomputed_tokens:
        scheduler.advance(scheduler.apply(scheduler.plan()))
        blocks.check_integrity(scheduler.running)
    one.append(7)
    scheduler.remove(one)
    blocks.check_integrity([])


def test_the_next_turn_is_found_though_its_beginning_was_evicted() -> None:
    blocks, scheduler = pool(24)
    conversation = list(range(80))
    run(blocks, scheduler, sequence(0, conversation))
    run(blocks, scheduler, sequence(1, [90] * 48))  # evicts what the window has passed: it is the oldest
    again = sequence(2, [*conversation, 1, 2])
    run(blocks, scheduler, again)
    assert again.num_cached_tokens == 80


def test_a_hit_holds_only_what_the_window_reaches() -> None:
    blocks, scheduler = pool(40)
    conversation = list(range(80))
    run(blocks, scheduler, sequence(0, conversation))
    again = sequence(1, [*conversation, 1, 2])
    scheduler.add(again)
    scheduler.apply(scheduler.plan())
    # Position 80 sees 71 .. 80: blocks 17 (68-71), 18, 19, and 20 for the new tokens.
    assert len(again.held_blocks) == 4
    assert blocks.num_free_blocks == 36
    blocks.check_integrity([again])


def test_room_is_set_aside_only_for_what_a_hit_holds() -> None:
    blocks, scheduler = pool(32, chunk=64)
    conversation = list(range(80))
    run(blocks, scheduler, sequence(0, conversation))
    newcomer, again = sequence(1, [90] * 48), sequence(2, [*conversation, 1])
    for one in (newcomer, again):
        scheduler.add(one)
    assert {chunk.sequence for chunk in scheduler.apply(scheduler.plan())} == {newcomer, again}
    blocks.check_integrity([newcomer, again])


@pytest.mark.parametrize(("lost", "cached_tokens"), [(19, 76), (17, 68), (0, 80), (16, 80), (18, 72)])
def test_a_lost_block_within_reach_moves_the_hit_before_it(lost: int, cached_tokens: int) -> None:
    blocks, scheduler = pool(40)
    conversation = list(range(80))
    one = sequence(0, conversation)
    run(blocks, scheduler, one)
    assert blocks._cache is not None
    block = blocks._cache.find(one.block_hashes[lost])
    assert block is not None
    blocks._cache.remove(block)
    assert len(blocks.match_prefix(sequence(1, [*conversation, 1]))) * BLOCK == cached_tokens


def test_a_prefix_shorter_than_the_window_needs_all_of_its_blocks() -> None:
    blocks, scheduler = pool(40)
    one = sequence(0, list(range(12)))
    run(blocks, scheduler, one)
    assert len(blocks.match_prefix(sequence(1, [*range(12), 1]))) == 3
    assert blocks._cache is not None
    block = blocks._cache.find(one.block_hashes[0])
    assert block is not None
    blocks._cache.remove(block)
    assert blocks.match_prefix(sequence(1, [*range(12), 1])) == []


def test_a_long_prompt_holds_its_window_and_a_chunk_in_windowed_layers() -> None:
    blocks, scheduler = hybrid_pool(64)
    one = sequence(0, list(range(160)))
    scheduler.add(one)
    most = 0
    while one.num_uncomputed_tokens:
        chunks = scheduler.apply(scheduler.plan())
        windowed = len(one.held_blocks)
        most = max(most, windowed)
        assert len(one.other_tables[0].held_blocks) == 40, "the full layers keep all"
        scheduler.advance(chunks)
    assert most <= blocks.most_held_blocks(160) - 40
    assert most <= -(-(WINDOW + CHUNK) // BLOCK) + 1
    assert len(one.held_blocks) * BLOCK < WINDOW + BLOCK, "behind the prompt it holds its window"
    blocks.check_integrity([one])


def test_a_hit_needs_only_the_window_of_windowed_layers() -> None:
    blocks, scheduler = hybrid_pool(64)
    conversation = list(range(80))
    first = sequence(0, conversation)
    run(blocks, scheduler, first)
    cache = blocks._cache
    assert cache is not None
    for block_hash in first.block_hashes[:17]:  # position 80 sees 71 .. 80: blocks 17, 18, 19
        block = cache.find(block_hash)
        if block is not None:
            cache.remove(block)
            blocks._pool.evictable.pop(block)
            blocks._pool.free[block] = None
    again = sequence(1, [*conversation, 1, 2])
    run(blocks, scheduler, again)
    assert again.num_cached_tokens == 80


@pytest.mark.parametrize("lost", [17, 18, 19])
@pytest.mark.parametrize("group", [0, 1])
def test_a_block_lost_in_one_group_is_a_hit_in_none(lost: int, group: int) -> None:
    blocks, scheduler = hybrid_pool(64)
    conversation = list(range(80))
    first = sequence(0, conversation)
    run(blocks, scheduler, first)
    assert len(blocks.match_prefix(sequence(1, [*conversation, 1]))) == 20
    cache = (blocks._cache, blocks._others[0]._cache)[group]
    assert cache is not None
    block = cache.find(first.block_hashes[lost])
    assert block is not None
    cache.remove(block)
    hits = blocks.match_prefix(sequence(1, [*conversation, 1]))
    assert len(hits) == lost == len(hits.others[0])


def test_a_block_kept_behind_the_window_fails_the_check() -> None:
    blocks, scheduler = hybrid_pool(64)
    one = sequence(0, list(range(80)))
    scheduler.add(one)
    for _ in range(3):
        scheduler.advance(scheduler.apply(scheduler.plan()))
    blocks.check_integrity([one])
    one.num_computed_tokens += BLOCK
    with pytest.raises(RuntimeError, match="window has passed it"):
        blocks.check_integrity([one])


@pytest.mark.parametrize("windows", [WINDOWED, MIXED, (6, WINDOW, None)])
def test_the_pool_always_holds_one_request_of_the_greatest_length(windows: Windows) -> None:
    for length in range(1, 120):
        needed = pool(1000, windows=windows)[0].most_held_blocks(length)
        blocks, scheduler = pool(needed, 1, windows)
        run(blocks, scheduler, sequence(0, [5] * length))
        assert scheduler.num_preemptions_total == 0


@pytest.mark.parametrize("window", [1, 4, 6, 9, 11])
def test_it_holds_one_request_whatever_the_steps_leave_of_a_block(window: int) -> None:
    rng, windows = random.Random(window), (window, None)
    for chunk in range(1, 12):
        for length in (30, 61, 90):
            needed = pool(1000, windows=windows, chunk=chunk)[0].most_held_blocks(length)
            blocks, scheduler = pool(needed, 1, windows, chunk)
            one = sequence(0, [5] * length)
            scheduler.add(one)
            while one.num_uncomputed_tokens:
                scheduler._max_num_batched_tokens = rng.randint(1, chunk)  # as pacing cuts it
                scheduler.advance(scheduler.apply(scheduler.plan()))
                blocks.check_integrity(scheduler.running)
                assert scheduler.num_preemptions_total == 0


@pytest.mark.matrix("windows")
@pytest.mark.parametrize("windows", [WINDOWED, MIXED, (6, WINDOW, WINDOW, None), (WINDOW, 30)])
@pytest.mark.parametrize("seed", range(10))
def test_random_turns_lose_and_miscount_no_block(seed: int, windows: Windows) -> None:
    rng = random.Random(seed)
    needed = pool(1000, 4, windows)[0].most_held_blocks(120)
    blocks, scheduler = pool(needed + rng.randint(0, 3), 4, windows)
    turns: list[list[int]] = []
    for number in range(150):
        base = rng.choice(turns) if turns and rng.random() < 0.6 else []
        tokens = [*base, *(rng.randrange(50) for _ in range(rng.randint(1, 30)))][:100]
        turns.append(tokens)
        scheduler.add(sequence(number, tokens))
        for _ in range(rng.randint(0, 5)):
            for chunk in scheduler.apply(scheduler.plan()):
                scheduler.advance([chunk])
                if not chunk.sequence.num_uncomputed_tokens:
                    chunk.sequence.append(7)
            blocks.check_integrity(scheduler.running)
        for one in list(scheduler.running):
            if len(one.token_ids) > one.num_prompt_tokens and rng.random() < 0.5:
                scheduler.remove(one)
    assert scheduler.hit_tokens_total > 0
    for one in [*scheduler.running, *scheduler._waiting]:
        scheduler.remove(one)
    blocks.check_integrity([])
    assert blocks.num_free_blocks == blocks.num_blocks


def test_what_is_found_in_the_step_itself_takes_no_room_that_was_not_set_aside() -> None:
    """Another prompt of the step fills a hole in a cached chain, so all behind it is found.

    Each windowed group then holds the window behind the hole and the next chunk, each rounded up to blocks. That may be
    one block more than window and chunk together.
    """
    windows = (WINDOW, WINDOW, WINDOW, None)
    blocks, scheduler = pool(120, 3, windows, chunk=17)  # whose end is not that of a block
    conversation = list(range(40))
    run(blocks, scheduler, sequence(0, conversation))
    one, other = sequence(1, [*conversation[:BLOCK], 1]), sequence(2, [*conversation, 2, *range(60, 80)])
    for cache in blocks._pool.caches:  # the first block is evicted in all groups
        block = cache.find(extend_hashes(one, BLOCK, cache.root)[0])
        if block is not None:
            del blocks._pool.evictable[block]
            blocks._pool.forget(block)
            blocks._pool.free[block] = None
    scheduler.add(one)
    scheduler.add(other)
    plan = scheduler.plan()
    assert set(plan.admitted) == {one, other}
    before = blocks.num_free_blocks
    set_aside = sum(blocks.fresh_blocks(each, hits) for each, hits in plan.admitted.items())
    chunks = scheduler.apply(plan)
    assert other.num_computed_tokens == 40  # found in this step
    assert before - blocks.num_free_blocks <= set_aside
    scheduler.advance(chunks)
    blocks.check_integrity([one, other])
