"""How many later prompts start before another: bounded by its own delay, whatever comes and leaves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.waiting_order import (
    MOST_DELAY_ARRIVALS,
    PRIORITY_STRIDE_ARRIVALS,
    TOKENS_PER_ARRIVAL,
    delay_arrivals,
    queue_order,
)

LONG_TOKENS = TOKENS_PER_ARRIVAL * (MOST_DELAY_ARRIVALS + 1)


def sequence(arrival: int, num_tokens: int, priority: int = 0, token: int = 1) -> Sequence:
    prompt = [token] * num_tokens
    request = Request(str(arrival), prompt, SamplingParams(max_tokens=2), priority=priority)
    return Sequence(request, arrival, 0, list(prompt), num_tokens)


class OneRow:
    """A scheduler that runs one request at a time, so that the order of starts is that of the queue."""

    def __init__(self, *, prefix_caching: bool = False) -> None:
        self.scheduler = Scheduler(BlockManager(1000, 16, 1, enable_prefix_caching=prefix_caching), 4096, 1)
        self.started: list[Sequence] = []

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.started += plan.admitted
        chunks = self.scheduler.apply(plan)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        self.scheduler.advance(chunks)
        for one in sampling:
            one.append(1)
            if one.num_generated_tokens == 2:
                self.scheduler.remove(one)

    def run_to_the_end(self) -> list[int]:
        """Arrivals in the order of their starts."""
        while self.scheduler.has_work:
            self.step()
        return [one.arrival for one in self.started]


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_longer_prompts_wait_longer_up_to_a_bound_below_a_step_of_priority(one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    assert 0 <= delay_arrivals(shorter) <= delay_arrivals(longer) <= MOST_DELAY_ARRIVALS < PRIORITY_STRIDE_ARRIVALS


def test_a_long_prompt_lets_as_many_later_ones_pass_as_its_delay_and_no_more() -> None:
    row = OneRow()
    row.scheduler.add(sequence(0, LONG_TOKENS))
    for arrival in range(1, MOST_DELAY_ARRIVALS + 10):
        row.scheduler.add(sequence(arrival, 1))
    started = row.run_to_the_end()
    assert started.index(0) == MOST_DELAY_ARRIVALS - 1, "of equal orders the first to arrive is first"


prompts = st.sampled_from([1, 2, TOKENS_PER_ARRIVAL, 4 * TOKENS_PER_ARRIVAL, LONG_TOKENS // 2, LONG_TOKENS])
events = st.lists(
    st.tuples(
        st.lists(st.tuples(prompts, st.sampled_from([0, 0, 0, -1, 1])), max_size=6),  # tokens and priority of arrivals
        st.none() | st.integers(0, 50),  # which of those that wait is cancelled
        st.integers(0, 4),  # steps
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=60, deadline=None)
@given(events)
def test_each_prompt_starts_after_a_bounded_number_of_others(
    events: list[tuple[list[tuple[int, int]], int | None, int]],
) -> None:
    """Arrivals by an adversary, who also cancels: what is cancelled changes nobody's place."""
    row = OneRow()
    arrivals: list[Sequence] = []
    cancelled: set[Sequence] = set()
    for coming, which, num_steps in events:
        for num_tokens, priority in coming:
            arrivals.append(sequence(len(arrivals), num_tokens, priority))
            row.scheduler.add(arrivals[-1])
        waiting = [one for one in arrivals if one not in row.started and one not in cancelled]
        if which is not None and waiting:
            cancelled.add(waiting[which % len(waiting)])
            row.scheduler.remove(waiting[which % len(waiting)])
        for _ in range(num_steps):
            row.step()
    row.run_to_the_end()
    assert set(row.started) == set(arrivals) - cancelled
    for place, one in enumerate(row.started):
        before = row.started[:place]
        passed_by = [other for other in before if other.arrival > one.arrival]
        equals = [other for other in passed_by if other.request.priority == one.request.priority]
        assert len(equals) <= delay_arrivals(one.num_prompt_tokens)
        assert all(other.num_prompt_tokens < one.num_prompt_tokens for other in equals), (
            "equal prompts keep their order"
        )
        assert all(other.request.priority <= one.request.priority for other in passed_by), (
            "nor do less urgent ones pass"
        )


def test_a_long_prompt_starts_as_soon_as_the_one_before_it_is_computed_whoever_passes_meanwhile() -> None:
    """Short prompts have their half of each step (`prompt_budget`), so more pass than by the order alone. But never for
    longer than the long prompts before it take."""
    scheduler = Scheduler(BlockManager(1000, 16, 8), 32, 8)
    first, second = sequence(0, 960), sequence(1, 960)
    arrivals = [first, second]
    for one in arrivals:
        scheduler.add(one)
    num_passed, steps_between = 0, 0
    while not second.num_computed_tokens:
        steps_between += first.num_computed_tokens >= first.num_prompt_tokens
        for _ in range(2):
            arrivals.append(sequence(len(arrivals), 8))
            scheduler.add(arrivals[-1])
        plan = scheduler.plan()
        num_passed += len(plan.admitted.keys() - {first, second})
        chunks = scheduler.apply(plan)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        scheduler.advance(chunks)
        for one in sampling:
            one.append(1)
            if one.num_generated_tokens == 2:
                scheduler.remove(one)
    assert num_passed > MOST_DELAY_ARRIVALS
    assert steps_between <= 1


def test_what_is_cached_of_a_prompt_does_not_delay_it() -> None:
    row = OneRow(prefix_caching=True)
    row.scheduler.add(sequence(0, LONG_TOKENS))
    row.run_to_the_end()
    for late in (sequence(1, LONG_TOKENS, token=2), sequence(2, LONG_TOKENS), sequence(3, 16, token=3)):
        row.scheduler.add(late)
    assert row.run_to_the_end() == [0, 2, 3, 1]


def test_a_preempted_prompt_returns_to_its_place() -> None:
    """It was placed by its prompt; what it has generated, and what is cached by then, does not move it."""
    scheduler = Scheduler(BlockManager(1000, 16, 4, enable_prefix_caching=True), 4096, 4)
    one = sequence(0, 20 * TOKENS_PER_ARRIVAL)
    scheduler.add(one)
    before = one.order
    plan = scheduler.plan()
    scheduler.advance(scheduler.apply(plan))
    scheduler.roll_back(plan)
    assert one.row is None
    assert one.order == before == queue_order(0, 0, 20 * TOKENS_PER_ARRIVAL)
