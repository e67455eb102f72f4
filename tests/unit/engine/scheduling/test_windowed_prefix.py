"""Where every layer has a window, a cached prefix needs only the blocks that the next token attends to."""

from __future__ import annotations

import random

import pytest

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence

BLOCK, WINDOW = 4, 10


def sequence(number: int, tokens: list[int]) -> Sequence:
    request = Request(str(number), tokens, SamplingParams(max_tokens=1))
    return Sequence(request, number, seed=0, token_ids=list(tokens), num_prompt_tokens=len(tokens))


def pool(num_blocks: int, num_rows: int = 2) -> tuple[BlockManager, Scheduler]:
    blocks = BlockManager(num_blocks, BLOCK, num_rows, enable_prefix_caching=True, window_tokens=WINDOW)
    return blocks, Scheduler(blocks, 16, num_rows)  # chunks of at most four blocks


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
    blocks = BlockManager(32, BLOCK, 2, enable_prefix_caching=True, window_tokens=WINDOW)
    scheduler = Scheduler(blocks, 64, 2)
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


@pytest.mark.parametrize("seed", range(10))
def test_random_turns_lose_and_miscount_no_block(seed: int) -> None:
    rng = random.Random(seed)
    blocks, scheduler = pool(rng.randint(30, 60), 4)
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
