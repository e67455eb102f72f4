"""Clients take turns: whatever one of them sends, the others have their share, and alone nothing changes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.scheduling.fair_queue import (
    BURST_TOKENS,
    MOST_IDLE_COUNTS,
    QUANTUM_TOKENS,
    SERVED_PER_RECOMPUTED,
    FairQueue,
)
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.waiting_order import queue_order
from tests.support.simulated_clients import BLOCK_TOKENS, Bursts, Flood, SimulatedEngine, p95

BUDGET_TOKENS = 64
LONGEST_PROMPT, LONGEST_ANSWER = 60, 300


def some_prompt(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(rng.randint(least, most))]


# --- One client ------------------------------------------------------------------------------------------------------


def order_before(sequence: Sequence) -> tuple[int, int]:
    """How everything that waited was sorted before there were clients."""
    request = sequence.request
    return queue_order(sequence.arrival, request.priority, sequence.num_prompt_tokens), sequence.arrival


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 6), st.integers(40, 80))
def test_one_client_is_served_in_the_order_of_before(seed: int, rows: int, num_blocks: int) -> None:
    """Room is given to the first of the sorted list (`divide` says who computes). Of the running the least urgent, then
    the least computed, then the last is preempted, but never the first."""
    rng = random.Random(seed)
    engine = SimulatedEngine(rows, rows + BUDGET_TOKENS, num_blocks=num_blocks, caches=False)
    for _ in range(60):
        for _ in range(rng.choice((0, 0, 1, 3))):
            engine.add("a", some_prompt(rng, 1, 200), rng.randint(1, 200), priority=rng.randint(-2, 2), queue_of="")
        waiting = sorted(engine.scheduler._waiting, key=order_before)
        running = [*engine.scheduler.running]
        plan = engine.scheduler.plan()
        assert set(plan.admitted) <= set(waiting[: rows - len(running)]), "only the first have room"
        for victim in plan.preempted:
            candidates = running[1:] or running
            assert victim == min(
                candidates, key=lambda one: (-one.request.priority, one.num_computed_tokens, -one.order)
            )
            running.remove(victim)
        engine.step()


# --- The bound -------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 4), st.integers(2, 8))
def test_of_clients_that_wait_none_is_behind_by_more_than_the_bound(seed: int, num_clients: int, rows: int) -> None:
    """`docs/serving.md` states it. Prompts, answers, priorities and cancels are those of an adversary."""
    rng = random.Random(seed)
    engine = SimulatedEngine(rows, BUDGET_TOKENS, num_blocks=64 * rows)
    bound_tokens = QUANTUM_TOKENS + LONGEST_PROMPT + BUDGET_TOKENS + rows**2
    sizes = {f"k{number}": rng.choice((1, LONGEST_PROMPT)) for number in range(num_clients)}
    answers = {client: rng.choice((1, 20, LONGEST_ANSWER)) for client in sizes}
    for _ in range(400):
        for client in sizes:
            while engine.num_left[client] < 2 * rows + 2:
                prompt = some_prompt(rng, 1, sizes[client])
                priority = rng.choice((-100, 0, 100))
                engine.add(client, prompt, rng.randint(1, answers[client]), priority=priority)
        if rng.random() < 0.1:
            engine.cancel(rng.choice([*engine.scheduler._waiting, *engine.scheduler.running]))
        engine.step()
        served = [engine.scheduler._waiting.served_tokens(client) for client in sizes]
        assert max(served) - min(served) <= bound_tokens


def test_more_clients_than_rows_share_them_by_turns_although_preemptions_are_rationed() -> None:
    """No answer ends by itself, so each turn takes a preemption, and soon the burst is used up."""
    engine = SimulatedEngine(2, BUDGET_TOKENS)
    clients = ["a", "b", "c", "d"]
    for client in clients:
        for _ in range(3):
            engine.add(client, [len(engine.num_left)] * 20, 100_000)
    ration_tokens = 2 * BLOCK_TOKENS * SERVED_PER_RECOMPUTED
    for _ in range(8000):
        engine.step()
        served = [engine.scheduler._waiting.served_tokens(client) for client in clients]
        assert max(served) - min(served) <= QUANTUM_TOKENS + 20 + BUDGET_TOKENS + 2**2 + ration_tokens
    assert engine.scheduler.recomputed_tokens_total <= engine.computed.total() / SERVED_PER_RECOMPUTED + BURST_TOKENS
    assert min(served) > 1000


# --- Four clients, one of them a flood -------------------------------------------------------------------------------

# Rows, of which a quarter is the fair share; steps; and what each of three other clients sends: requests at once, steps
# from one burst to the next. Their answers have 30 tokens on average, so they use most of their quarters.
BATCHES = {4: (3000, 2, 90), 64: (900, 24, 70)}


def others(rows: int) -> list[Bursts]:
    _, size, period = BATCHES[rows]
    return [Bursts(f"k{n}", size, period, (10, 50), rng=random.Random(n)) for n in range(3)]


def flood(rows: int, priority: int, longest_answer: int) -> Flood:
    def request(rng: random.Random) -> tuple[list[int], int]:
        return some_prompt(rng, 8, 40), rng.randint(longest_answer // 4, longest_answer)

    return Flood("flood", 2 * rows, request, priority)


def run(rows: int, steps: int, clients: list[Bursts | Flood], *, queue_of: str | None = None) -> SimulatedEngine:
    engine = SimulatedEngine(rows, 2 * rows + BUDGET_TOKENS)
    for _ in range(steps):
        for client in clients:
            client.arrive(engine, queue_of)
        engine.step()
    return engine


@pytest.mark.matrix("rows")
@pytest.mark.parametrize(("priority", "longest_answer"), [(-100, 100), (-100, 2000), (100, 100)])
@pytest.mark.parametrize("rows", BATCHES)
def test_a_flood_delays_no_other_client_beyond_three_times_a_quarter_of_the_machine(
    rows: int, priority: int, longest_answer: int
) -> None:
    steps = BATCHES[rows][0]
    quarters = {client.client: run(rows // 4, steps, [client]).waits[client.client] for client in others(rows)}
    together: list[Bursts | Flood] = [flood(rows, priority, longest_answer), *others(rows)]
    shared = run(rows, steps, together)
    for client, quarter in quarters.items():
        assert p95(shared.waits[client]) <= 3 * p95(quarter), f"{client}: {p95(shared.waits[client])} steps"
    # Rows are in use as if all requests were of one client, and little is computed again.
    together = [flood(rows, priority, longest_answer), *others(rows)]
    alone = run(rows, steps, together, queue_of="")
    assert shared.num_chunks >= 0.98 * alone.num_chunks
    assert shared.scheduler.recomputed_tokens_total <= 0.02 * shared.computed.total()


# --- Attacks ---------------------------------------------------------------------------------------------------------


def test_a_client_with_one_slow_answer_collects_no_credit() -> None:
    """`slow` has one answer under way and none that waits, while `flood` waits. What it leaves over is not owed."""
    rng = random.Random(4)
    engine = SimulatedEngine(4, BUDGET_TOKENS)
    engine.add("slow", some_prompt(rng, 8, 8), 5000)
    busy = flood(4, 0, 40)
    for _ in range(1500):
        busy.arrive(engine)
        engine.step()
    before = engine.computed["flood"]
    greedy = Flood("slow", 40, lambda rng: (some_prompt(rng, 8, 40), 30))
    for _ in range(600):
        busy.arrive(engine)
        greedy.arrive(engine)
        engine.step()
    assert engine.computed["flood"] - before >= 0.4 * 4 * 600, "half of the rows, but for the bound"


def test_cancelled_requests_leave_neither_credit_nor_debt_behind() -> None:
    """One client submits and cancels at once, for as long as the other computes; then both want everything."""
    rng = random.Random(5)
    engine = SimulatedEngine(4, BUDGET_TOKENS)
    honest = Flood("honest", 12, lambda rng: (some_prompt(rng, 8, 40), rng.randint(10, 50)))
    for _ in range(500):
        honest.arrive(engine)
        made = [engine.add("cancels", some_prompt(rng, 8, 40), 1000, priority=-100) for _ in range(8)]
        for one in made:
            engine.cancel(one)
        engine.step()
    before = engine.computed["honest"]
    greedy = Flood("cancels", 40, lambda rng: (some_prompt(rng, 8, 40), 30), priority=-100)
    for _ in range(400):
        honest.arrive(engine)
        greedy.arrive(engine)
        engine.step()
    assert engine.computed["honest"] - before >= 0.4 * 4 * 400


def test_a_client_that_cancels_what_is_computed_has_used_its_turn() -> None:
    """`waster` lets each long prompt be computed and cancels it before its answer."""
    rng = random.Random(6)
    engine = SimulatedEngine(2, BUDGET_TOKENS)
    honest = Flood("honest", 8, lambda rng: (some_prompt(rng, 8, 40), 20))
    for _ in range(600):
        honest.arrive(engine)
        while engine.num_left["waster"] < 4:
            engine.add("waster", some_prompt(rng, 150, 150), 500, priority=-100)
        for one in [*engine.scheduler.running]:
            if one.request.client == "waster" and one.num_generated_tokens:
                engine.cancel(one)
        engine.step()
    assert engine.computed["honest"] >= 0.45 * engine.computed.total()


def test_prompts_from_the_cache_cost_no_turn_and_take_no_more_rows_than_a_share() -> None:
    engine = SimulatedEngine(4, BUDGET_TOKENS)
    shared_prefix = [*range(480)]
    cached = Flood("cached", 40, lambda rng: ([*shared_prefix, rng.randrange(1000)], 60), priority=-100)
    honest = Flood("honest", 12, lambda rng: (some_prompt(rng, 8, 40), 60))
    for _ in range(800):
        cached.arrive(engine)
        honest.arrive(engine)
        engine.step()
    assert engine.computed["honest"] >= 0.45 * engine.computed.total()


def test_where_the_pool_is_short_the_client_that_was_served_most_gives_way() -> None:
    """Whatever the priorities. Both have grown until nothing is free."""
    engine = SimulatedEngine(4, BUDGET_TOKENS, num_blocks=20, caches=False)
    most = [engine.add("most", [1] * 40, 200, priority=-100) for _ in range(3)]
    least = engine.add("least", [2] * 40, 200, priority=100)
    engine.add("most", [1] * 40, 200, priority=-100)  # it waits, so what is served counts
    while not engine.scheduler.num_preemptions_total:
        engine.step()
    assert least.num_preemptions == 0
    assert sum(one.num_preemptions for one in most) == 1


def test_short_prompts_of_two_clients_share_a_step() -> None:
    """All have a row already; a step computes half of them."""
    engine = SimulatedEngine(8, 32)
    for client in ("a", "b"):
        for _ in range(4):
            one = engine.add(client, [len(client)] * 16, 4)
            engine.scheduler._waiting.remove(one)
            one.row = engine.scheduler._free_rows.allocate(None)
            engine.scheduler.running.append(one)
    engine.step()
    assert engine.computed == {"a": 16, "b": 16}


def test_counts_of_clients_that_have_gone_are_dropped() -> None:
    """Keys may be rotated for years while something always waits."""
    engine = SimulatedEngine(1, BUDGET_TOKENS)
    engine.add("stays", [1] * 8, 1 << 20)
    engine.add("stays", [1] * 8, 1 << 20)
    queue: FairQueue = engine.scheduler._waiting
    for number in range(3 * MOST_IDLE_COUNTS):
        engine.cancel(engine.add(f"gone{number}", [1], 1))
    assert len(queue._served) <= MOST_IDLE_COUNTS + 2
    assert len(queue._waiting) == 1


def test_preemptions_for_a_turn_stop_where_they_cost_too_much() -> None:
    """Without a prefix cache everything is computed again: long contexts stay, and the one that waits is not lost."""
    engine = SimulatedEngine(1, 4096, num_blocks=1024, caches=False)
    engine.add("long", [1] * 3000, 1200)
    engine.step()
    engine.add("waits", [2] * 8, 4)
    for _ in range(QUANTUM_TOKENS + 2):
        engine.step()
    assert engine.scheduler.num_preemptions_total == 1, "the first one has all of the burst"
    recomputed = engine.scheduler.recomputed_tokens_total
    for _ in range(600):
        if not engine.num_left["waits"]:
            engine.add("waits", [2] * 8, 4)
        engine.step()
    assert engine.scheduler.recomputed_tokens_total - recomputed <= 3000 + 2 * QUANTUM_TOKENS
    assert engine.scheduler.num_preemptions_total == 1
    assert BURST_TOKENS < 3000


# --- Ranks -----------------------------------------------------------------------------------------------------------


def test_a_key_of_rank_comes_before_the_others_and_shares_with_its_equals() -> None:
    """All four flood. Those of rank have all turns, by halves; the others have theirs once nothing of rank waits."""
    engine, rng = SimulatedEngine(4, BUDGET_TOKENS), random.Random(7)
    ranks = {"a": False, "b": False, "up": True, "top": True}

    def flood(*clients: str) -> None:
        for client in clients:
            while engine.num_left[client] < 12:
                engine.add(client, some_prompt(rng, 1, 40), rng.randint(1, 40), ranks_above=ranks[client])

    for _ in range(300):
        flood("a", "b")
        engine.step()
    before = engine.computed.copy()
    for _ in range(1000):
        flood(*ranks)
        engine.step()
    served = engine.computed - before
    assert served["a"] + served["b"] <= 600, "the answers under way end"
    counts = [engine.scheduler._waiting.served_tokens(client) for client in ("up", "top")]
    assert abs(counts[0] - counts[1]) <= QUANTUM_TOKENS + 40 + BUDGET_TOKENS + 4**2
    assert served["up"] > 1000
    before = engine.computed.copy()
    for _ in range(2000):
        flood("a", "b")
        engine.step()
    served = engine.computed - before
    assert engine.num_left["up"] == engine.num_left["top"] == 0
    assert min(served["a"], served["b"]) > 1000


def test_a_key_of_rank_need_not_wait_for_the_answers_of_another() -> None:
    engine = SimulatedEngine(2, BUDGET_TOKENS)
    for _ in range(2):
        engine.add("a", [1] * 20, 100_000)
    for _ in range(20):
        engine.step()
    engine.add("up", [2] * 20, 4, ranks_above=True)
    for _ in range(20):
        engine.step()
    assert engine.waits["up"][0] < 8, "it has the row of a key that has two"
    assert engine.num_left == {"a": 2, "up": 0}


def test_the_newest_request_says_whether_a_key_ranks_above() -> None:
    engine = SimulatedEngine(1, BUDGET_TOKENS)
    queue: FairQueue = engine.scheduler._waiting
    engine.add("a", [1] * 8, 4, ranks_above=True)
    assert queue.served_tokens("a") < 0
    engine.add("a", [1] * 8, 4)
    assert queue.served_tokens("a") == 0
