"""Who waits for whom: every accepted prompt has its first token after a number of steps that follows from the work
before it, whoever else comes and cancels, and however answers are executed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.waiting_order import delay_arrivals
from tests.support.crowded import PROMPT_TOKENS, crowd
from tests.support.drafters import always
from tests.support.engines import MakeEngine, WriteModel, greedy
from tests.support.tape_recorder import TapeRecorder

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
VOCABULARY = 199
LEAST_SHARE_TOKENS = PROMPT_TOKENS // 2  # of a step: what short prompts have, and what long ones have
EXECUTIONS: dict[str, Callable[[], Execution]] = {
    "plain": Execution,
    "overlapped": lambda: Execution(overlapped=True),
    "replayed": lambda: Execution(TapeRecorder()),
    "replayed and overlapped": lambda: Execution(TapeRecorder(), overlapped=True),
    "speculating": Execution,
    "speculating, replayed and overlapped": lambda: Execution(TapeRecorder(), overlapped=True),
}


@pytest.fixture(params=EXECUTIONS)
def engine(request: pytest.FixtureRequest, write_model: WriteModel, make_engine: MakeEngine) -> Engine:
    """An engine that computes few tokens of prompts per step while an answer is under way, with room for all.

    Where it speculates, every answer checks as many drafts as it may, and hardly any stand: none ends sooner by them.
    """
    engine = make_engine(
        write_model(max_position_embeddings=1024, num_hidden_layers=8),
        execution=EXECUTIONS[request.param](),
        drafter=always(7) if "speculating" in request.param else None,
        max_num_seqs=64,
        kv_cache_memory_bytes=16 << 20,
    )
    crowd(engine)
    engine.add_request(Request("answer", [1, 2, 3], greedy(1000)))
    engine.step()
    return engine


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def steps_to_first_token(engine: Engine, request_id: str, most: int, each_step: Callable[[int], None]) -> int:
    for step in range(most):
        each_step(step)
        if any(output.request_id == request_id for output in engine.step()):
            return step + 1
    raise AssertionError(f"no first token of {request_id} within {most} steps")


def test_a_client_that_submits_and_cancels_delays_no_other(engine: Engine) -> None:
    """Neither a prompt that came with one of its requests, nor the ones that come later."""
    rng = random.Random(1)
    for turn in range(5):
        engine.add_request(Request(f"hostile-{turn}-0", prompt(rng, 40), greedy(50)))
        engine.add_request(Request(f"polite-{turn}", prompt(rng, 4), greedy(2)))

        def submit_and_cancel(step: int, turn: int = turn) -> None:
            if step and step % 4 == 0:
                engine.abort(f"hostile-{turn}-{step // 4 - 1}")
                engine.add_request(Request(f"hostile-{turn}-{step // 4}", prompt(rng, 40), greedy(50)))

        most = -(-44 // LEAST_SHARE_TOKENS) + 3
        steps_to_first_token(engine, f"polite-{turn}", most, submit_and_cancel)


def test_short_prompts_do_not_wait_for_a_long_one(engine: Engine) -> None:
    rng = random.Random(2)
    engine.add_request(Request("long", prompt(rng, 900), greedy(2)))
    for turn in range(5):
        engine.add_request(Request(f"short-{turn}", prompt(rng, 4), greedy(2)))
        steps_to_first_token(engine, f"short-{turn}", 4, lambda step: None)
    assert engine._sequences["long"].num_computed_tokens < 900, "it is still under way"


def test_a_long_prompt_is_not_starved_by_an_endless_stream_of_short_ones(engine: Engine) -> None:
    rng = random.Random(3)
    engine.add_request(Request("long", prompt(rng, 300), greedy(2)))

    def arrive(step: int) -> None:
        for index in range(3):  # more tokens than a step computes
            engine.add_request(Request(f"short-{step}-{index}", prompt(rng, 4), greedy(1)))

    # All rows may be taken by short prompts that are waiting for their first token, never more.
    steps_to_first_token(engine, "long", 300 // LEAST_SHARE_TOKENS + 3, arrive)


@dataclass
class Waiting:
    """A request without a first token."""

    request_id: str
    num_tokens: int
    order: int
    began_step: int
    work_before: int  # tokens of those before it in order, and its own
    num_passed_by: int = 0  # later arrivals that come before it

    @property
    def latest_step(self) -> int:
        """After which its first token must have come."""
        return self.began_step + -(-self.work_before // LEAST_SHARE_TOKENS) + 3


@pytest.mark.matrix("engine")
@pytest.mark.parametrize("seed", range(2))
def test_every_prompt_has_its_first_token_within_steps_that_follow_from_the_work_before_it(
    engine: Engine, seed: int
) -> None:
    """Arrivals and cancels at random, prompts short and long. A step computes at least LEAST_SHARE_TOKENS of those
    before a prompt and of itself, so their sum bounds the steps; cancels only make it less. A long prompt lets few
    later ones pass."""
    rng = random.Random(seed)
    waiting: dict[str, Waiting] = {}
    for step in range(250):
        for index in range(rng.choice((0, 0, 0, 1, 1, 3))):
            if len(engine._sequences) >= 60:
                break  # rows are never what a prompt waits for
            num_tokens = rng.choice((1, 3, 4, 5, 9, 17, 40, 120))
            work_before = sum(one.num_tokens for one in waiting.values()) + num_tokens
            name = f"{step}-{index}"
            engine.add_request(Request(name, prompt(rng, num_tokens), greedy(rng.randint(1, 8))))
            order = engine._sequences[name].order
            for one in waiting.values():
                if order < one.order:
                    one.work_before += num_tokens
                    one.num_passed_by += 1
                    assert one.num_passed_by <= delay_arrivals(one.num_tokens)
            waiting[name] = Waiting(name, num_tokens, order, step, work_before)
        if rng.random() < 0.4:  # mostly prompts that are under way: one that has begun is the first in order
            cancelled = next(iter(waiting), None) if rng.random() < 0.5 else rng.choice([*waiting, None])
            if cancelled is not None:
                engine.abort(cancelled)
                del waiting[cancelled]
        for output in engine.step():
            waiting.pop(output.request_id, None)
        late = [one for one in waiting.values() if step > one.latest_step]
        assert not late, f"at step {step} no first token of {late}"
        engine.check_integrity()
