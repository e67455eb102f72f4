"""The prefix cache without a model: who shares what, what is evicted first, and what a salt keeps apart."""

from __future__ import annotations

import random

import pytest

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.prefix_cache import extend_hashes
from millstream_runtime.engine.scheduling.rows import Rows
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence

BLOCK = 4


def sequence(
    name: str, tokens: list[int], *, salt: str = "", max_tokens: int = 1, is_heartbeat: bool = False
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    made = Request(name, tokens, sampling, cache_salt=salt, is_heartbeat=is_heartbeat)
    return Sequence(made, int(name), seed=0, token_ids=list(tokens), num_prompt_tokens=len(tokens))


def run(scheduler: Scheduler, *newcomers: Sequence) -> list[tuple[str, int]]:
    """One step; (request, tokens computed) for each chunk."""
    for one in newcomers:
        scheduler.add(one)
    chunks = scheduler.apply(scheduler.plan())
    scheduler.advance(chunks)
    for chunk in chunks:
        if not chunk.sequence.num_uncomputed_tokens:
            chunk.sequence.append(7)
    return [(chunk.sequence.request.request_id, chunk.num_tokens) for chunk in chunks]


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(24, BLOCK, 4, enable_prefix_caching=True)


@pytest.fixture
def scheduler(blocks: BlockManager) -> Scheduler:
    return Scheduler(blocks, 64, 4)


PROMPT = list(range(10))  # two full blocks and two tokens


def test_a_prompt_seen_before_is_computed_from_its_last_block_on(scheduler: Scheduler) -> None:
    first, second = sequence("0", PROMPT), sequence("1", [*PROMPT[:9], 99, 98])
    assert run(scheduler, first) == [("0", 10)]
    assert run(scheduler, second) == [("0", 1), ("1", 3)]
    assert second.num_cached_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert (scheduler.queried_tokens_total, scheduler.hit_tokens_total) == (21, 8)


def test_what_is_cached_of_a_prompt_does_not_wait_to_be_computed(scheduler: Scheduler) -> None:
    first, second = sequence("0", PROMPT, max_tokens=9), sequence("1", [*PROMPT[:9], 99, 98])
    scheduler.add(first)
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (10, 0)
    run(scheduler)
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (0, 10)
    scheduler.add(second)
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (3, 10)  # two blocks of its eleven are cached
    run(scheduler)
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (0, 11 + 11)
    scheduler.remove(first)
    assert (scheduler.queued_tokens, scheduler.running_tokens) == (0, 11)


def test_equal_prompts_of_one_step_share_what_the_first_computes(scheduler: Scheduler) -> None:
    choices = [sequence(str(index), PROMPT) for index in range(3)]
    assert run(scheduler, *choices) == [("0", 10), ("1", 2), ("2", 2)]


def test_a_whole_prompt_in_the_cache_still_computes_one_token(scheduler: Scheduler) -> None:
    run(scheduler, sequence("0", PROMPT[:8]))
    assert run(scheduler, sequence("1", PROMPT[:8])) == [("0", 1), ("1", 4)]


def test_an_answer_is_cached_too_for_the_next_turn(scheduler: Scheduler, blocks: BlockManager) -> None:
    first = sequence("0", PROMPT)
    run(scheduler, first)
    for _ in range(4):
        run(scheduler)
    scheduler.remove(first)
    assert blocks.num_free_blocks == 24
    known = first.token_ids[:-1]  # the last one was sampled, not computed
    assert run(scheduler, sequence("1", [*known, 50, 51])) == [("1", len(known) + 2 - 12)]


def test_a_returning_conversation_gets_its_row_and_its_contiguous_blocks_back(scheduler: Scheduler) -> None:
    first, other = sequence("0", PROMPT), sequence("1", [33] * 10)
    run(scheduler, first, other)
    row = first.row
    for one in (first, other):
        scheduler.remove(one)
    again = sequence("2", [*PROMPT, 1, 2, 3])
    run(scheduler, again)
    assert (again.row, again.blocks_are_contiguous) == (row, True)


def test_salts_keep_tenants_apart_and_the_chain_tells_positions_apart(scheduler: Scheduler) -> None:
    run(scheduler, sequence("0", PROMPT, salt="a"))
    assert run(scheduler, sequence("1", PROMPT, salt="b"))[-1] == ("1", 10)
    assert run(scheduler, sequence("2", PROMPT[4:], salt="a"))[-1] == ("2", 6)  # the same tokens one block later
    assert run(scheduler, sequence("3", PROMPT, salt="a"))[-1] == ("3", 2)


def test_heartbeats_and_prompt_logprobs_neither_read_nor_write_the_cache(scheduler: Scheduler) -> None:
    run(scheduler, sequence("0", PROMPT, is_heartbeat=True))
    assert run(scheduler, sequence("1", PROMPT))[-1] == ("1", 10)
    scoring = Request("2", PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert run(scheduler, Sequence(scoring, 2, 0, list(PROMPT), 10))[-1] == ("2", 10)


def test_the_longest_unused_prefix_goes_first_and_its_tail_before_its_head() -> None:
    blocks = BlockManager(9, BLOCK, 9, enable_prefix_caching=True)  # regions of one block: only the order counts
    for name, token in (("0", 1), ("1", 2)):
        one = sequence(name, [token] * 13)
        one.row = 8 if token == 1 else 0
        blocks.allocate(one, 13)
        blocks.publish(one, 13)
        blocks.free(one)
    assert (len(blocks.match_prefix(sequence("2", [1] * 13))), len(blocks.match_prefix(sequence("3", [2] * 13)))) == (
        3,
        3,
    )
    taker = sequence("4", [3] * 16)
    taker.row = 1
    blocks.allocate(taker, 16)  # three unknown blocks, then one evicted
    assert (len(blocks.match_prefix(sequence("5", [1] * 13))), len(blocks.match_prefix(sequence("6", [2] * 13)))) == (
        2,
        3,
    )
    blocks.check_integrity([taker])


def test_a_damaged_sequence_leaves_nothing_in_the_cache(scheduler: Scheduler, blocks: BlockManager) -> None:
    sick, neighbour = sequence("0", PROMPT), sequence("1", PROMPT)
    run(scheduler, sick, neighbour)
    assert blocks.unpublish(sick) == sick.block_table[2:]  # to be zeroed: what the neighbour reads is not
    scheduler.remove(sick)
    assert run(scheduler, sequence("2", PROMPT))[-1] == ("2", 10)
    blocks.check_integrity(scheduler.running)


def test_keys_that_went_wrong_are_computed_again_in_new_blocks(scheduler: Scheduler, blocks: BlockManager) -> None:
    """longrope: the length turns the angles, and equal tokens have other keys from then on."""
    turned, neighbour = sequence("0", PROMPT), sequence("1", PROMPT)
    run(scheduler, turned, neighbour)
    shared = neighbour.block_table[:2]
    scheduler.recompute(turned)
    turned.kv_variant = 1
    assert run(scheduler) == [("1", 1), ("0", 11)]
    assert neighbour.block_table[:2] == shared
    assert not {*turned.block_table} & {*shared}
    blocks.check_integrity(scheduler.running)
    assert run(scheduler, sequence("2", PROMPT))[-1] == ("2", 2)  # the unturned keys


def test_a_window_gives_back_what_it_passed(blocks: BlockManager) -> None:
    blocks = BlockManager(24, BLOCK, 4, window_tokens=6)
    scheduler = Scheduler(blocks, 64, 4)
    one = sequence("0", list(range(14)))
    run(scheduler, one)
    # Position 14 sees 9 .. 14: blocks 0 (0-3) and 1 (4-7) are passed.
    assert one.num_passed_blocks == 2
    assert blocks.num_free_blocks == 24 - 2
    for _ in range(20):
        run(scheduler)
        blocks.check_integrity(scheduler.running)
        assert 24 - blocks.num_free_blocks <= 3
    scheduler.remove(one)
    assert blocks.num_free_blocks == 24
    blocks.check_integrity([])


def test_a_chunk_longer_than_the_window_leaves_no_block_both_free_and_cached() -> None:
    """Nor one whose blocks are published late, when the window has passed the first of them."""
    blocks = BlockManager(8, BLOCK, 4, enable_prefix_caching=True, window_tokens=6)
    scheduler = Scheduler(blocks, 64, 4)
    scheduler.add(sequence("0", list(range(22))))
    chunks = scheduler.apply(scheduler.plan())
    scheduler.advance(chunks)
    blocks.check_integrity(scheduler.running)
    other = sequence("1", list(range(22)))
    found = blocks.match_prefix(other)
    assert len(found) == 5
    assert found[3:] == chunks[0].sequence.block_table[3:5], "what position 20 attends to"
    taken, late = sequence("2", [7] * 24), chunks[0].sequence
    taken.row = 1
    blocks.allocate(taken, 24)  # overwrites what the window has passed
    late.num_published_blocks = 0
    blocks.publish(late, 22)
    blocks.check_integrity([late, taken])
    assert blocks.match_prefix(other) == [], "what was overwritten is not published again"


def test_integrity_names_a_block_that_is_free_and_cached(blocks: BlockManager) -> None:
    assert blocks._cache is not None
    blocks._cache.insert(b"x", next(iter(blocks._pool.free)))
    with pytest.raises(RuntimeError, match="is free, and the prefix cache would still hand it out"):
        blocks.check_integrity([])


def test_clean_rows_go_out_lowest_first_and_caching_ones_longest_unused_first() -> None:
    rows = Rows(4)
    assert [rows.allocate() for _ in range(4)] == [0, 1, 2, 3]
    for row, cached in ((2, True), (1, True), (3, False), (0, False)):
        rows.release(row, is_cached=cached)
    assert rows.allocate(preferred=1) == 1
    assert [rows.allocate(preferred=1) for _ in range(3)] == [0, 3, 2]
    assert len(rows) == 0


def test_hashes_are_computed_once_and_are_those_of_the_tokens() -> None:
    one, other = sequence("0", PROMPT), sequence("1", PROMPT[:9])
    hashes = list(extend_hashes(one, BLOCK))
    assert hashes == extend_hashes(other, BLOCK)
    one.token_ids += [5, 6, 7]
    assert extend_hashes(one, BLOCK)[:2] == hashes
    assert len({*extend_hashes(one, BLOCK)}) == 3


def test_random_traffic_with_removals_loses_and_miscounts_no_block(scheduler: Scheduler, blocks: BlockManager) -> None:
    rng = random.Random(11)
    for arrival in range(400):
        shared = [9] * rng.choice([0, 4, 8, 16])
        scheduler.add(sequence(str(arrival), [*shared, *(rng.randrange(3) for _ in range(rng.randint(1, 12)))]))
        run(scheduler)
        blocks.check_integrity(scheduler.running)
        if scheduler.running and rng.random() < 0.9:
            scheduler.remove(rng.choice(scheduler.running))
        blocks.check_integrity(scheduler.running)
    assert scheduler.hit_tokens_total > 0
    for one in [*scheduler.running, *scheduler._waiting]:
        scheduler.remove(one)
    assert blocks.num_free_blocks == 24
