"""Prompts that are computed beside the steps: the thread, and what others see of a chunk that is under way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from millstream_runtime.engine.cpu.side_prefill import ThreadedPrefill
from millstream_runtime.engine.cpu.side_thread import NICENESS, SideThread
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request
from tests.support.crowded import crowd
from tests.support.engines import MakeEngine, WriteModel, greedy

PROMPT = [index % 190 for index in range(100)]
PATIENCE_SECONDS = 60.0


def test_a_job_is_called_until_it_is_done() -> None:
    calls: list[int] = []

    def job() -> bool:
        calls.append(threading.get_native_id())
        return len(calls) < 3

    side = SideThread(1)
    side.start(job)
    while side.is_busy:
        threading.Event().wait(0.001)
    assert len(calls) == 3
    assert set(calls) != {threading.get_native_id()}


def test_a_stop_waits_for_the_call_under_way_and_no_longer() -> None:
    entered, leave, calls = threading.Event(), threading.Event(), [0]

    def job() -> bool:
        calls[0] += 1
        entered.set()
        leave.wait(PATIENCE_SECONDS)
        return True  # there would be more to do

    side = SideThread(1)
    side.start(job)
    assert entered.wait(PATIENCE_SECONDS)
    threading.Timer(0.05, leave.set).start()
    side.stop()
    assert leave.is_set()
    assert (side.is_busy, calls[0]) == (False, 1)


def test_what_a_job_raises_reaches_whoever_waits_for_it_once() -> None:
    def job() -> bool:
        raise MemoryError("no room for scores")

    side = SideThread(1)
    side.start(job)
    with pytest.raises(MemoryError, match="no room"):
        side.stop()
    side.stop()


def test_it_computes_with_its_own_threads_and_gives_way_to_others() -> None:
    seen: list[int] = []

    def job() -> bool:
        seen.append(torch.get_num_threads())
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return False

    before, own_priority = torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)
    side = SideThread(1)
    side.start(job)
    side.stop()
    assert seen == [1, NICENESS]
    assert (torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)) == (before, own_priority)


class Held:
    """An engine with a side thread that waits before each layer until it is let on, and an answer under way."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.gate, self.entered = engine, threading.Event(), threading.Event()
        side = engine._chunked_prefill._side
        assert isinstance(side, ThreadedPrefill)
        start = side.thread.start

        def gated(job: object) -> None:
            def wait_and_do() -> bool:
                self.entered.set()
                self.gate.wait(PATIENCE_SECONDS)
                return job()  # type: ignore[operator, no-any-return]

            start(wait_and_do)

        side.thread.start = gated  # type: ignore[method-assign]
        self.side = side
        crowd(engine)
        engine.add_request(Request("answer", [1, 2, 3], greedy(60)))
        engine.step()

    def begin(self, name: str) -> None:
        """Have a prompt begun on the side thread."""
        self.engine.add_request(Request(name, PROMPT, greedy(3)))
        self.engine.step()
        assert self.entered.wait(PATIENCE_SECONDS)


@pytest.fixture
def held(write_model: WriteModel, make_engine: MakeEngine) -> Iterator[Held]:
    held = Held(make_engine(write_model(), execution=Execution(side_threads=1)))
    yield held
    held.gate.set()
    held.engine.close()


def test_answers_go_on_while_a_prompt_is_computed_beside_them(held: Held) -> None:
    held.begin("long")
    tokens = [output.request_id for _ in range(20) for output in held.engine.step()]
    assert tokens == ["answer"] * 20
    held.gate.set()
    later = {output.request_id for _ in range(30) for output in held.engine.step()}
    assert later == {"answer", "long"}


def test_the_prefix_cache_is_not_offered_what_is_not_computed(held: Held) -> None:
    """An equal prompt that comes meanwhile would read keys that are not there yet."""
    held.begin("long")
    blocks = held.engine._blocks
    twin = held.engine._sequences["long"]
    assert blocks.match_prefix(twin) == []
    assert held.engine.stats().prefix_cache_hit_tokens_total == 0
    held.gate.set()
    while held.engine._chunked_prefill.partial:
        held.engine.step()
    assert len(blocks.match_prefix(twin)) == (len(PROMPT) - 1) // blocks.block_size_tokens


def test_a_prompt_that_is_cancelled_is_left_alone_before_its_blocks_are_given_back(held: Held) -> None:
    held.begin("long")
    threading.Timer(0.05, held.gate.set).start()
    held.engine.abort("long")
    assert not held.side.is_busy
    held.engine.check_integrity()
    assert "long" not in {output.request_id for _ in range(20) for output in held.engine.step()}


def test_the_last_answer_ends_and_the_prompt_goes_on_with_all_threads(held: Held) -> None:
    held.begin("long")
    held.engine.abort("answer")
    threading.Timer(0.05, held.gate.set).start()
    (output,) = held.engine.step()
    assert output.request_id == "long"


def test_an_error_beside_the_steps_is_not_lost(held: Held) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for scores")

    held.begin("long")
    held.engine._runner._forward.model.pass_layers = fail  # type: ignore[method-assign, assignment]
    held.gate.set()
    with pytest.raises(MemoryError):
        held.engine.abort("long")
