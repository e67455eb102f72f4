"""How a step divides its budget among prompts, and how long a prompt waits for others at most."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.prompt_budget import PromptBudget, PromptNeed, StepLoad, divide
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.waiting_order import MOST_DELAY_ARRIVALS


def sequence(arrival: int, num_tokens: int) -> Sequence:
    prompt = [arrival] * num_tokens
    return Sequence(Request(str(arrival), prompt, SamplingParams(100)), arrival, 0, list(prompt), num_tokens)


def divided(budget: PromptBudget, *lengths: int, context_tokens: int = 0) -> list[int]:
    needs = [PromptNeed(sequence(index, length), length, context_tokens) for index, length in enumerate(lengths)]
    chunks = divide(budget, needs)
    return [chunks.get(need.sequence, 0) for need in needs]


def test_prompts_that_fit_enter_whole_and_together() -> None:
    assert divided(PromptBudget(100), 30, 20, 40) == [30, 20, 40]
    assert divided(PromptBudget(100), 30, 40, 40, 40) == [30, 40, 30, 0], "no overtaking among equals"


def test_short_and_long_prompts_have_half_each_and_what_the_other_side_leaves() -> None:
    budget = PromptBudget(100)
    assert divided(budget, 500, 40) == [60, 40]
    assert divided(budget, 500, 10, 400) == [90, 10, 0]
    assert divided(budget, 500, 40, 40, 40) == [50, 40, 10, 0]
    assert divided(budget, 55, 40, 40) == [50, 40, 10]
    assert divided(budget, 500) == [100]


def test_time_bounds_what_tokens_do_not() -> None:
    budget = PromptBudget(1000, work=100.0, balance_tokens=100.0)
    assert divided(budget, 500) == [73]  # 73 * (1 + 36.5 / 100) = 99.6
    assert divided(budget, 500, context_tokens=900) == [16], "the least, whatever it costs"
    assert divided(budget, 500, 20) == [60, 20]


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(lengths, st.integers(1, 40), st.floats(1.0, 40.0))
def test_a_budget_is_never_exceeded_nor_left_while_a_prompt_waits(
    prompts: list[int], tokens: int, allowed_work: float
) -> None:
    budget = PromptBudget(tokens, allowed_work, least_tokens=1)
    chunks = divided(budget, *prompts)
    most = min(tokens, int(allowed_work))
    assert sum(chunks) <= max(most, min(2, tokens)), "at least a token of each kind"
    assert sum(chunks) >= min(sum(prompts), most - 1), "halves are rounded down"
    assert all(0 <= chunk <= prompt for chunk, prompt in zip(chunks, prompts, strict=True))


class Arrivals:
    """A scheduler with room for all, an answer under way, and prompts that come and are cancelled."""

    def __init__(self, budget: PromptBudget) -> None:
        self.scheduler = Scheduler(BlockManager(100_000, 16, 2000, enable_prefix_caching=False), 4096, 2000)
        self.budget = budget
        self.began_step: dict[Sequence, int] = {}
        self.work_before: dict[Sequence, int] = {}  # tokens of those before it in order, and its own
        self.num_steps = 0
        self._arrivals = 0
        self._add(1)

    def _add(self, num_tokens: int) -> Sequence:
        added = sequence(self._arrivals, num_tokens)
        self._arrivals += 1
        self.scheduler.add(added)
        return added

    def arrive(self, num_tokens: int) -> None:
        """It waits for no more than all tokens before it in order and its own, at half of the budget per step."""
        added = self._add(num_tokens)
        self.work_before[added] = sum(one.num_uncomputed_tokens for one in self.began_step) + num_tokens
        for one in self.began_step:
            if added.order < one.order:  # bounded in number: see `waiting_order`
                self.work_before[one] += num_tokens
        self.began_step[added] = self.num_steps

    def latest_step(self, one: Sequence) -> int:
        half = min(self.budget.tokens, int(self.budget.work)) // 2
        return self.began_step[one] + -(-self.work_before[one] // half) + 2

    def cancel(self, which: int) -> None:
        if self.began_step:
            cancelled = list(self.began_step)[which % len(self.began_step)]
            del self.began_step[cancelled]
            self.scheduler.remove(cancelled)

    def step(self) -> None:
        chunks = self.scheduler.apply(self.scheduler.plan(lambda load: replace(self.budget, tokens=load.max_tokens)))
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        self.scheduler.advance(chunks)
        self.num_steps += 1
        for one in sampling:
            one.append(7)
            if self.began_step.pop(one, None) is not None:
                self.scheduler.remove(one)
        assert all(self.num_steps <= self.latest_step(one) for one in self.began_step)


events = st.lists(
    st.tuples(st.lists(st.sampled_from([1, 2, 3, 5, 8, 20, 100, 300]), max_size=4), st.none() | st.integers(0, 50)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(events, st.integers(4, 40))
def test_every_prompt_has_its_first_token_within_steps_that_follow_from_the_work_before_it(
    events: list[tuple[list[int], int | None]], allowed_work: int
) -> None:
    arrivals = Arrivals(PromptBudget(4096, float(allowed_work), least_tokens=1))
    for prompts, cancelled in events:
        for num_tokens in prompts:
            arrivals.arrive(num_tokens)
        if cancelled is not None:
            arrivals.cancel(cancelled)
        arrivals.step()
    while arrivals.began_step:
        arrivals.step()


def test_a_long_prompt_without_a_chunk_keeps_its_room_and_nothing_overtakes_one_without_room() -> None:
    scheduler = Scheduler(BlockManager(40, 16, 8, enable_prefix_caching=False), 4096, 8)

    def budget(load: StepLoad) -> PromptBudget:
        return PromptBudget(load.max_tokens, work=64.0)

    prompts = [sequence(0, 20), sequence(1, 200), sequence(2, 200), sequence(3, 10), sequence(4, 200)]
    scheduler.add(prompts[0])
    chunks = scheduler.apply(scheduler.plan(budget))
    scheduler.advance(chunks)
    prompts[0].append(7)
    for one in prompts[1:]:
        scheduler.add(one)
    plan = scheduler.plan(budget)
    assert [(one.arrival, num_tokens) for one, num_tokens in plan.chunks.items()] == [(0, 1), (3, 10), (1, 54)]
    assert list(plan.admitted) == [prompts[3], prompts[1]], "the second long prompt waits, the short one does not"
    scheduler.apply(plan)
    late = 5 + MOST_DELAY_ARRIVALS  # more than a long prompt lets pass
    scheduler.add(sequence(late, 10))
    # 40 blocks: 2 and 13 and 1 are taken, 13 are set aside for the second long prompt; the third needs 13 as well.
    blocked = scheduler.plan(budget)
    assert all(one.arrival not in (4, late) for one in blocked.admitted), "nothing behind it overtakes what lacks room"
