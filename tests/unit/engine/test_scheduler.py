"""The scheduler alone, without torch: budgets are kept, everything ends, nobody starves, no block is lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.block_manager import BlockManager
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduler import Scheduler
from millstream_runtime.engine.sequence import Sequence

BLOCK = 4
MAX_LEN = 48


def sequence(arrival: int, prompt_len: int, max_tokens: int) -> Sequence:
    request = Request(str(arrival), [1] * prompt_len, SamplingParams(max_tokens=max_tokens))
    return Sequence(request, arrival, seed=0, token_ids=[1] * prompt_len, num_prompt_tokens=prompt_len)


class Simulation:
    """The engine without a model: every sampled token is 1."""

    def __init__(self, num_blocks: int, budget: int, max_num_seqs: int) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, max_num_seqs)
        self.scheduler = Scheduler(self.blocks, budget, max_num_seqs)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.finished: list[int] = []
        self.sampled = 0

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan.chunks, "work, but no step: a deadlock"
        assert plan.num_tokens <= self.budget
        assert len(self.scheduler.running) <= self.max_num_seqs
        rows = [one.row for one in self.scheduler.running]
        assert len(set(rows)) == len(rows)
        for chunk in plan.chunks:
            one = chunk.sequence
            assert 0 < chunk.num_tokens <= one.num_uncomputed_tokens
            assert len(one.block_table) * BLOCK >= one.num_computed_tokens + chunk.num_tokens
            samples = chunk.samples
            one.num_computed_tokens += chunk.num_tokens
            if samples:
                one.token_ids.append(1)
                self.sampled += 1
                if one.num_generated_tokens >= one.request.sampling.max_tokens or len(one.token_ids) >= MAX_LEN:
                    self.scheduler.remove(one)
                    self.finished.append(one.arrival)
        self.blocks.check_integrity(self.scheduler.running)


jobs = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(jobs, st.integers(MAX_LEN // BLOCK, 40), st.integers(1, 6), st.integers(0, 40))
def test_everything_ends_within_budget_and_pool(
    jobs: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int, extra_budget: int
) -> None:
    simulation = Simulation(num_blocks, max_num_seqs + extra_budget, max_num_seqs)
    waiting = [(arrival, *job) for arrival, job in enumerate(jobs)]
    for _ in range(20_000):
        while waiting and (waiting[0][3] == 0 or not simulation.scheduler.has_work):
            arrival, prompt_len, max_tokens, _ = waiting.pop(0)
            simulation.scheduler.add(sequence(arrival, prompt_len, max_tokens))
        if not simulation.scheduler.has_work:
            break
        if waiting:
            arrival, prompt_len, max_tokens, gap = waiting[0]
            waiting[0] = (arrival, prompt_len, max_tokens, gap - 1)
        simulation.step()
    assert sorted(simulation.finished) == list(range(len(jobs)))
    assert simulation.blocks.num_free_blocks == num_blocks


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 18), st.integers(2, 4), st.integers(12, 20))
def test_nobody_starves_under_endless_arrivals(
    prompt_len: int, max_tokens: int, max_num_seqs: int, num_blocks: int
) -> None:
    """One request among newcomers that never stop coming: it ends, within the work of those before it."""
    simulation = Simulation(num_blocks, 16, max_num_seqs)
    for arrival in range(3):
        simulation.scheduler.add(sequence(arrival, 20, 20))
    simulation.scheduler.add(sequence(3, prompt_len, max_tokens))
    for arrival in range(4, 2000):
        simulation.scheduler.add(sequence(arrival, 3, 12))
        simulation.step()
        if 3 in simulation.finished:
            return
    raise AssertionError("the request never finished")


def test_prompt_chunks_and_decodes_share_a_step_and_decodes_go_first() -> None:
    simulation = Simulation(num_blocks=40, budget=8, max_num_seqs=4)
    simulation.scheduler.add(sequence(0, 4, 10))
    simulation.step()
    simulation.scheduler.add(sequence(1, 30, 10))
    plan = simulation.scheduler.schedule()
    assert [(chunk.sequence.arrival, chunk.num_tokens) for chunk in plan.chunks] == [(0, 1), (1, 7)]
    assert [chunk.samples for chunk in plan.chunks] == [True, False]


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
    blocks.grow(one, 4 * BLOCK)
    assert one.block_table == [4, 5, 6, 7]
    at_home = one.blocks_are_contiguous
    blocks.grow(one, 5 * BLOCK)
    assert one.block_table[4] in (3, 11)
    assert (at_home, one.blocks_are_contiguous) == (True, False)
    blocks.check_integrity([one])
    blocks.free(one)
    assert blocks.num_free_blocks == 12


def test_integrity_names_a_leak_and_a_double_owner() -> None:
    import pytest

    blocks = BlockManager(num_blocks=4, block_size_tokens=BLOCK, num_rows=2)
    one, two = sequence(0, 1, 1), sequence(1, 1, 1)
    one.row, two.row = 0, 1
    blocks.grow(one, BLOCK)
    with pytest.raises(RuntimeError, match="leaked"):
        blocks.check_integrity([])
    two.block_table.append(one.block_table[0])
    with pytest.raises(RuntimeError, match="held by request 1 and by request 0"):
        blocks.check_integrity([one, two])
    with pytest.raises(ValueError, match="more blocks than"):
        blocks.grow(one, 100 * BLOCK)
