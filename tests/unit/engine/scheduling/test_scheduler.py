"""The scheduler alone, without torch: budgets are kept, everything ends, nobody starves, no block is lost."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import Chunk, SchedulerState, schedule
from millstream_runtime.engine.scheduling.waiting_order import PRIORITY_STRIDE_ARRIVALS

BLOCK = 4
MAX_LEN = 48


def sequence(
    arrival: int, prompt_len: int, max_tokens: int, *, priority: int = 0, prompt: Seq[int] | None = None
) -> Sequence:
    """Prompts are equal as far as they go, unless one is given: the prefix cache has much to share."""
    token_ids = list(prompt) if prompt is not None else [1] * prompt_len
    request = Request(str(arrival), token_ids, SamplingParams(max_tokens=max_tokens), priority=priority)
    return Sequence(request, arrival, seed=0, token_ids=token_ids, num_prompt_tokens=len(token_ids))


class Simulation:
    """The engine without a model: every sampled token is 1."""

    def __init__(
        self,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        *,
        prefix_caching: bool = False,
        has_regions: bool = True,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks, BLOCK, max_num_seqs, enable_prefix_caching=prefix_caching, has_regions=has_regions
        )
        self.scheduler = Scheduler(self.blocks, budget, max_num_seqs)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.finished: list[int] = []

    def step(self) -> list[Chunk]:
        chunks = self.scheduler.apply(self.scheduler.plan())
        assert chunks, "work, but no step: a deadlock"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        rows = [one.row for one in self.scheduler.running]
        assert len(set(rows)) == len(rows)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        for one, num_tokens in chunks:
            assert 0 < num_tokens <= one.num_uncomputed_tokens
            assert len(one.block_table) * BLOCK >= one.num_computed_tokens + num_tokens
        self.scheduler.advance(chunks)
        for one in sampling:
            one.append(1)
            if one.num_generated_tokens >= one.request.sampling.max_tokens or len(one.token_ids) >= MAX_LEN:
                self.scheduler.remove(one)
                self.finished.append(one.arrival)
        self.blocks.check_integrity(self.scheduler.running)
        self.scheduler.check_counts()
        return chunks


jobs = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 6), st.integers(-2, 2)), min_size=1, max_size=14
)


@settings(max_examples=150, deadline=None)
@given(jobs, st.integers(MAX_LEN // BLOCK, 40), st.integers(1, 6), st.integers(0, 40), st.booleans(), st.booleans())
def test_everything_ends_within_budget_and_pool(
    jobs: list[tuple[int, int, int, int]],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    prefix_caching: bool,
    has_regions: bool,
) -> None:
    simulation = Simulation(
        num_blocks,
        max_num_seqs + extra_budget,
        max_num_seqs,
        prefix_caching=prefix_caching,
        has_regions=has_regions,
    )
    coming = [
        (sequence(arrival, prompt_len, max_tokens, priority=priority), gap)
        for arrival, (prompt_len, max_tokens, gap, priority) in enumerate(jobs)
    ]
    for _ in range(20_000):
        while coming and (coming[0][1] <= 0 or not simulation.scheduler.has_work):
            simulation.scheduler.add(coming.pop(0)[0])
        if not simulation.scheduler.has_work:
            break
        if coming:
            coming[0] = (coming[0][0], coming[0][1] - 1)
        simulation.step()
    assert sorted(simulation.finished) == list(range(len(jobs)))
    assert simulation.blocks.num_free_blocks == num_blocks


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 18), st.integers(2, 4), st.integers(12, 20), st.integers(-1, 1))
def test_nobody_starves_under_endless_arrivals(
    prompt_len: int, max_tokens: int, max_num_seqs: int, num_blocks: int, newcomers_priority: int
) -> None:
    """One request among newcomers that never stop coming, and may be more urgent: it ends all the same."""
    simulation = Simulation(num_blocks, 16, max_num_seqs, prefix_caching=True)
    for arrival in range(3):
        simulation.scheduler.add(sequence(arrival, 20, 20))
    simulation.scheduler.add(sequence(3, prompt_len, max_tokens))
    for arrival in range(4, 2500):
        simulation.scheduler.add(sequence(arrival, 3, 12, priority=newcomers_priority))
        simulation.step()
        if 3 in simulation.finished:
            return
    raise AssertionError("the request never finished")


def test_a_priority_is_a_head_start_of_so_many_arrivals_and_no_more() -> None:
    simulation = Simulation(num_blocks=12, budget=16, max_num_seqs=1)
    late = PRIORITY_STRIDE_ARRIVALS + 5
    for arrival, priority in ((0, 0), (5, -1), (late, -1)):
        simulation.scheduler.add(sequence(arrival, 4, 1, priority=priority))
    while simulation.scheduler.has_work:
        simulation.step()
    assert simulation.finished == [5, 0, late]


@settings(max_examples=60, deadline=None)
@given(jobs, st.integers(0, 25), st.booleans())
def test_a_plan_changes_nothing_and_is_always_the_same(
    jobs: list[tuple[int, int, int, int]], num_steps: int, prefix_caching: bool
) -> None:
    simulation = Simulation(14, 12, 4, prefix_caching=prefix_caching)
    for arrival, (prompt_len, max_tokens, _, priority) in enumerate(jobs):
        simulation.scheduler.add(sequence(arrival, prompt_len, max_tokens, priority=priority))
    for _ in range(num_steps):
        if simulation.scheduler.has_work:
            simulation.step()
    scheduler = simulation.scheduler
    state = SchedulerState(simulation.blocks, scheduler.running, scheduler._waiting, len(scheduler._free_rows), 12)

    def everything() -> object:
        blocks, sequences = simulation.blocks, [*state.running, *state.waiting]
        return copy.deepcopy(
            [
                [(one.num_computed_tokens, one.block_table, one.row) for one in sequences],
                (list(blocks._pool.free), list(blocks._pool.evictable), blocks._pool.num_holders),
            ]
        )

    before = everything()
    plans = [schedule(state), schedule(state)]
    assert plans[0] == plans[1]
    assert everything() == before
    assert plans[0].num_tokens <= 12


def test_prompt_chunks_and_decodes_share_a_step_and_decodes_go_first() -> None:
    simulation = Simulation(num_blocks=40, budget=8, max_num_seqs=4)
    simulation.scheduler.add(sequence(0, 4, 10))
    simulation.step()
    simulation.scheduler.add(sequence(1, 30, 10))
    chunks = simulation.scheduler.apply(simulation.scheduler.plan())
    assert [(chunk.sequence.arrival, chunk.num_tokens) for chunk in chunks] == [(0, 1), (1, 7)]
    assert [chunk.samples for chunk in chunks] == [True, False]


def test_the_least_computed_is_preempted_and_returns_by_arrival() -> None:
    simulation = Simulation(num_blocks=12, budget=64, max_num_seqs=4)
    for arrival, prompt_len in enumerate([16, 12, 15]):  # 4 + 3 + 4 blocks of 12, one spare as watermark
        simulation.scheduler.add(sequence(arrival, prompt_len, 30))
    simulation.step()
    assert len(simulation.scheduler.running) == 3
    for _ in range(40):
        simulation.step()
        if simulation.scheduler.num_preemptions_total:
            break
    assert [one.arrival for one in simulation.scheduler.running] == [0, 2]
    while not simulation.finished:
        simulation.step()
    assert simulation.finished == [0]
    simulation.step()
    assert {one.arrival for one in simulation.scheduler.running} == {1, 2}


def test_sequences_stay_at_home_while_they_fit_and_borrow_far_ends_when_they_do_not() -> None:
    blocks = BlockManager(num_blocks=12, block_size_tokens=BLOCK, num_rows=3)
    one = sequence(0, 1, 1)
    one.row = 1
    blocks.allocate(one, 4 * BLOCK)
    assert one.block_table == [4, 5, 6, 7]
    at_home = one.blocks_are_contiguous
    blocks.allocate(one, 5 * BLOCK)
    assert one.block_table[4] in (3, 11)
    assert (at_home, one.blocks_are_contiguous) == (True, False)
    blocks.check_integrity([one])
    blocks.free(one)
    assert blocks.num_free_blocks == 12


def test_without_regions_blocks_are_taken_as_they_come() -> None:
    """As where attention reads block tables on the device."""
    blocks = BlockManager(
        num_blocks=12, block_size_tokens=BLOCK, num_rows=3, enable_prefix_caching=True, has_regions=False
    )
    one, two = sequence(0, 3 * BLOCK, 1), sequence(1, 1, 1)
    one.row, two.row = 2, 0
    blocks.allocate(one, 2 * BLOCK)
    blocks.allocate(two, BLOCK)
    blocks.allocate(one, 3 * BLOCK)
    assert (one.block_table, two.block_table) == ([0, 1, 3], [2])
    one.num_computed_tokens = 3 * BLOCK
    blocks.publish(one, 3 * BLOCK)
    assert blocks.row_of_hits(one.block_table) is None
    assert not any(blocks.region_is_cached(row) for row in range(3))
    blocks.check_integrity([one, two])
    blocks.free(two)
    two.row = 1
    blocks.allocate(two, 9 * BLOCK)
    assert sorted(two.block_table) == [2, *range(4, 12)]


def test_the_least_urgent_is_preempted_first() -> None:
    simulation = Simulation(num_blocks=12, budget=64, max_num_seqs=4)
    for arrival, (prompt_len, priority) in enumerate([(16, 0), (12, 0), (15, 1)]):
        simulation.scheduler.add(sequence(arrival, prompt_len, 30, priority=priority))
    while not simulation.scheduler.num_preemptions_total:
        simulation.step()
    assert [one.arrival for one in simulation.scheduler.running] == [0, 1]


def test_integrity_names_a_leak_a_miscount_and_a_shared_block_about_to_be_written() -> None:
    blocks = BlockManager(num_blocks=4, block_size_tokens=BLOCK, num_rows=2)
    one, two = sequence(0, 1, 1), sequence(1, 1, 1)
    one.row, two.row = 0, 1
    blocks.allocate(one, BLOCK)
    with pytest.raises(RuntimeError, match="leaked"):
        blocks.check_integrity([])
    two.block_table.append(one.block_table[0])
    with pytest.raises(RuntimeError, match="held by 2 requests, but counted 1"):
        blocks.check_integrity([one, two])
    blocks._pool.num_holders[one.block_table[0]] = 2
    with pytest.raises(RuntimeError, match="shared, but request 0 would write"):
        blocks.check_integrity([one, two])
    with pytest.raises(ValueError, match="more blocks than"):
        blocks.allocate(one, 100 * BLOCK)
