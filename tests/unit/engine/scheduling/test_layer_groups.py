"""Layers with a window and layers without one have block tables of their own, in one pool."""

from __future__ import annotations

import random

import pytest

from millstream_runtime.engine.kv.kv_layout import MOST_GROUPS, group_layers
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.hybrid_block_manager import HybridBlockManager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence

BLOCK, WINDOW, CHUNK = 4, 10, 16


def sequence(number: int, tokens: list[int]) -> Sequence:
    request = Request(str(number), tokens, SamplingParams(max_tokens=1))
    return Sequence(request, number, seed=0, token_ids=list(tokens), num_prompt_tokens=len(tokens))


def pool(
    num_blocks: int, num_rows: int = 2, windows: tuple[int | None, ...] = (WINDOW, None)
) -> tuple[HybridBlockManager, Scheduler]:
    blocks = HybridBlockManager(
        num_blocks, BLOCK, num_rows, windows=windows, lookahead_tokens=CHUNK, enable_prefix_caching=True
    )
    return blocks, Scheduler(blocks, CHUNK, num_rows)


def run(blocks: HybridBlockManager, scheduler: Scheduler, one: Sequence) -> None:
    scheduler.add(one)
    while one.num_uncomputed_tokens:
        scheduler.advance(scheduler.apply(scheduler.plan()))
        blocks.check_integrity(scheduler.running)
    one.append(7)
    scheduler.remove(one)
    blocks.check_integrity([])


@pytest.mark.parametrize(
    ("windowed", "full", "groups", "layers_per_group"),
    [(13, 13, 2, 13), (12, 12, 2, 12), (22, 4, 7, 4), (40, 8, 6, 8), (52, 10, 7, 10), (5, 1, 6, 1), (30, 1, 7, 5)],
    ids=["gemma-2-2b", "gpt-oss-20b", "gemma-3-1b", "gemma-3-12b", "gemma-3-27b", "five to one", "many to one"],
)
def test_groups_have_equally_many_layers_and_every_layer_a_place(
    windowed: int, full: int, groups: int, layers_per_group: int
) -> None:
    windows = [512] * windowed + [None] * full
    layout = group_layers(windows, 8192)
    assert (layout.num_groups, layout.layers_per_group) == (groups, layers_per_group)
    assert layout.num_groups <= MOST_GROUPS
    places = list(zip(layout.group_of, layout.place_of, strict=True))
    assert len(set(places)) == len(windows), "two layers would write to one place"
    assert max(layout.place_of) < layers_per_group
    assert [layout.windows[group] for group in layout.group_of] == windows
    assert layout.windows[-1] is None


@pytest.mark.parametrize("windows", [[512] * 4, [None] * 4, [512, None, 512, None]])
def test_a_model_has_one_group_where_all_layers_see_the_same(windows: list[int | None]) -> None:
    layout = group_layers(windows, 256 if None in windows else 8192)
    assert (layout.num_groups, layout.layers_per_group) == (1, 4)
    assert layout.windows == (512 if None not in windows else None,)


def test_a_long_prompt_holds_its_window_and_a_chunk_in_windowed_layers() -> None:
    blocks, scheduler = pool(64)
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
    blocks, scheduler = pool(64)
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
    blocks, scheduler = pool(64)
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
    blocks, scheduler = pool(64)
    one = sequence(0, list(range(80)))
    scheduler.add(one)
    for _ in range(3):
        scheduler.advance(scheduler.apply(scheduler.plan()))
    blocks.check_integrity([one])
    one.num_computed_tokens += BLOCK
    with pytest.raises(RuntimeError, match="window has passed it"):
        blocks.check_integrity([one])


def test_the_pool_always_holds_one_request_of_the_greatest_length() -> None:
    for length in range(1, 120):
        blocks, scheduler = pool(1000)
        needed = blocks.most_held_blocks(length)
        blocks, scheduler = pool(needed, num_rows=1)
        run(blocks, scheduler, sequence(0, [5] * length))
        assert scheduler.num_preemptions_total == 0


@pytest.mark.parametrize("windows", [(WINDOW, None), (6, WINDOW, WINDOW, None), (WINDOW, 30)])
@pytest.mark.parametrize("seed", range(10))
def test_random_turns_lose_and_miscount_no_block(seed: int, windows: tuple[int | None, ...]) -> None:
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
