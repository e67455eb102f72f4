"""What the engine promises whatever else goes on: a request's tokens depend on the request alone.

Each way of running (`tests/support/ways.py`) computes the same requests under another circumstance. Whatever it is,
every request must be answered as if it were alone in an engine without a cache, and afterwards every KV block must be
free. `speculation/test_no_token_changes.py` holds the same with drafts, `test_every_family.py` for every model family.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.drafters import OftenRight
from tests.support.engines import MakeEngine, WriteModel
from tests.support.pairs import every_pair
from tests.support.ways import (
    CROWDED,
    EXECUTIONS,
    SAMPLINGS,
    SPECULATING,
    VOCABULARY,
    WAYS,
    Answers,
    Way,
    all_at_once,
    cuts,
    engine_in,
    make_requests,
    one_after_another,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]


@pytest.mark.matrix("way")
@pytest.mark.parametrize(("way", "execution", "sampling"), every_pair(WAYS, [*EXECUTIONS, *CROWDED], SAMPLINGS))
def test_a_request_is_answered_as_if_it_were_alone(
    way: str,
    sampling: str,
    execution: str,
    write_model: WriteModel,
    make_engine: MakeEngine,
    alone: Callable[[str], Answers],
) -> None:
    circumstance = WAYS[way]
    engine = engine_in(circumstance, make_engine, write_model(), execution)
    assert circumstance.run(engine, make_requests(SAMPLINGS[sampling])) == alone(sampling)
    if execution in CROWDED:
        assert cuts(engine) or circumstance.run is one_after_another, "a prompt alone is not cut"
    else:
        assert circumstance.happened(engine) or sampling == "seeded, filtered and stopped"
        assert engine.graphs is None or engine.graphs.replayed_steps > 0


@pytest.mark.matrix("execution")
@pytest.mark.parametrize("execution", [*EXECUTIONS, *CROWDED, *SPECULATING])
@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_lost_whoever_ends_or_cancels_when(
    seed: int, execution: str, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    requests = [one for name in SAMPLINGS for one in make_requests(SAMPLINGS[name])]
    drafter = OftenRight({}, VOCABULARY, seed) if execution in SPECULATING else None
    way = Way(all_at_once, {"max_num_batched_tokens": 24}, 20)
    engine = engine_in(way, make_engine, write_model(), execution, drafter)
    rng = random.Random(seed)
    live: list[str] = []
    for step in range(120):
        if rng.random() < 0.5:
            live.append(f"r{step}")
            engine.add_request(replace(rng.choice(requests), request_id=live[-1], priority=rng.randint(-1, 1)))
        if live and rng.random() < 0.3:
            engine.abort(live.pop(rng.randrange(len(live))))
        engine.step()
        engine.check_integrity()
    for name in live:
        engine.abort(name)
    engine.check_integrity()
    assert engine.step() == [], "what was in flight is dropped"
    engine.check_integrity()
    assert (engine.has_work(), engine.stats().kv_blocks_used) == (False, 0)
