"""Two ranks execute steps as a GPU's would, over gloo, and answer like one rank that reads each step at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import FinishReason, Request
from tests.support import recording_follower
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for
from tests.support.small_pool import shrink_pool
from tests.support.tape_recorder import TapeRecorder
from tests.support.ways import (
    SAMPLINGS,
    Answers,
    all_at_once,
    joining_in_random_company,
    make_requests,
    never,
    preempts,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
OVERLAPPED = Execution(overlapped=True)
RECORDED_BY_RANK_1 = 12
TWO_RANKS = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def pair(one_thread: None) -> Iterator[Leader]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(recording_follower.RECORDED, str(RECORDED_BY_RANK_1))
        leader = Leader(2, torch.device("cpu"), follower_module=recording_follower.MODULE)
    yield leader
    leader.close()


def replays(engine: Engine) -> bool:
    """Rank 1 refused some buckets: rank 0 replays none of them."""
    use = engine.graphs
    return use is not None and use.replayed_steps > 0 and use.num_graphs == RECORDED_BY_RANK_1 and use.num_refused == 6


@dataclass(frozen=True)
class Way:
    run: Callable[[Engine, list[Request]], Answers]
    sampling: str
    execution: Callable[[], Execution] = lambda: OVERLAPPED
    pool_blocks: int | None = None
    happened: Callable[[Engine], bool] = never


WAYS = {
    "all at once": Way(all_at_once, "greedy"),
    "among others that are cancelled": Way(joining_in_random_company, "seeded, filtered and penalised"),
    "preempted": Way(all_at_once, "greedy", pool_blocks=17, happened=preempts),
    "replayed": Way(all_at_once, "greedy", lambda: Execution(TapeRecorder()), happened=replays),
    "replayed and overlapped, among others that are cancelled": Way(
        joining_in_random_company,
        "seeded, filtered and penalised",
        lambda: Execution(TapeRecorder(), overlapped=True),
        happened=replays,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_overlapped_ranks_answer_like_one(
    way: str, write_model: WriteModel, make_engine: MakeEngine, pair: Leader
) -> None:
    how = WAYS[way]
    requests = make_requests(SAMPLINGS[how.sampling])
    expected = all_at_once(make_engine(write_model()), requests)
    engine = make_engine(
        write_model(), rank_group=pair, execution=how.execution(), enable_prefix_caching=False, **TWO_RANKS
    )
    if how.pool_blocks is not None:
        shrink_pool(engine, how.pool_blocks, enable_prefix_caching=False)
    assert how.run(engine, requests) == expected
    assert how.happened(engine)


def test_a_step_is_launched_on_all_ranks_before_the_last_is_read(
    write_model: WriteModel, make_engine: MakeEngine, pair: Leader
) -> None:
    engine = make_engine(write_model(), rank_group=pair, execution=OVERLAPPED, **TWO_RANKS)
    engine.add_request(Request("one", [5, 17, 80], greedy(4)))
    engine.step()
    sequence = engine._sequences["one"]
    assert (sequence.num_unread_tokens, sequence.steps_in_flight) == (1, 1)
    while engine.has_work():
        engine.step()
    engine.check_integrity()


def test_numbers_that_go_wrong_end_one_request_on_all_ranks(
    write_model: WriteModel, make_engine: MakeEngine, pair: Leader
) -> None:
    """The other ranks have launched the step after, with some token in place of the one that is none."""
    expected = generate(make_engine(write_model()), requests_for([[4, 5, 6]], greedy(12)))["0"]
    engine = make_engine(write_model(), rank_group=pair, execution=OVERLAPPED, **TWO_RANKS)
    engine.add_request(Request("sick", [5, 17, 80, 3], greedy(12)))
    engine.add_request(Request("well", [4, 5, 6], greedy(12)))
    outputs = engine.step()
    block = engine._sequences["sick"].block_table[0]
    for layer in engine._runner._forward._cache.layers:  # of rank 0; sums carry it to the other
        layer[block] = float("nan")
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    sick = [(one.token_id, one.finish_reason) for one in outputs if one.request_id == "sick"]
    assert sick[-1] == (None, FinishReason.ERROR)
    assert [one.token_id for one in outputs if one.request_id == "well"] == expected
    assert generate(engine, requests_for([[4, 5, 6], [4, 5, 6]], greedy(12))) == {"0": expected, "1": expected}
