"""Families that mix windowed and full layers, with a block table per group of layers: the answers of `transformers`.

Prompts are several windows long, so that windowed layers have freed most of their blocks when the answers begin.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.family_cases import Models
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import prompts_of, reference_answers
from tests.support.ways import CHUNKED, NO_CACHE, Way, all_at_once, hits, preempts, twice

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("gemma2", "gemma3", "qwen2-windows")
PROMPT_LENGTHS, NEW_TOKENS = (31, 47, 63), 8  # each ends with one block more than it begins with
# By the number of groups: enough to admit two requests, and not for both to grow.
TIGHT_BLOCKS = {2: 10, 3: 14}
WAYS = {
    "batched": Way(all_at_once, NO_CACHE),
    "chunked": Way(all_at_once, NO_CACHE | CHUNKED),
    "chunked, with prefix hits": Way(twice, CHUNKED, happened=hits),
    "preempted": Way(all_at_once, NO_CACHE | CHUNKED, happened=preempts),
    "replayed and overlapped, with prefix hits": Way(
        twice, CHUNKED, happened=hits, execution=lambda: Execution(EagerRecorder(), overlapped=True)
    ),
    "overlapped, preempted": Way(
        all_at_once, NO_CACHE | CHUNKED, happened=preempts, execution=lambda: Execution(overlapped=True)
    ),
    "at TP 2, chunked, with prefix hits": Way(twice, CHUNKED, happened=hits, ranks=2),
    "at TP 2, preempted": Way(all_at_once, NO_CACHE | CHUNKED, happened=preempts, ranks=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("groups"))


@pytest.fixture(scope="module")
def by_transformers(models: Models) -> Callable[[str], list[list[int]]]:
    known: dict[str, list[list[int]]] = {}

    def answers(family: str) -> list[list[int]]:
        if family not in known:
            known[family] = reference_answers(models.reference(family), prompts_of(PROMPT_LENGTHS), NEW_TOKENS)
        return known[family]

    return answers


@pytest.fixture(scope="module")
def pair() -> Iterator[Leader]:
    leader = Leader(2, torch.device("cpu"))
    yield leader
    leader.close()


@pytest.mark.matrix("family")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_mixes_windows_answers_like_transformers(
    family: str,
    way: str,
    models: Models,
    by_transformers: Callable[[str], list[list[int]]],
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
) -> None:
    circumstance = WAYS[way]
    rank_group = request.getfixturevalue("pair") if circumstance.ranks > 1 else None
    ranks = {"rank_group": rank_group, "tensor_parallel_size": 2} if rank_group else {}
    engine = make_engine(
        models.folder(family),
        execution=circumstance.execution() if circumstance.execution else None,
        enable_hybrid_kv_cache_manager=True,
        **circumstance.config,
        **ranks,
    )
    num_groups = len(engine._blocks.windows)
    assert num_groups > 1
    if circumstance.happened is preempts:
        shrink_pool(engine, TIGHT_BLOCKS[num_groups])
    prompts = prompts_of(PROMPT_LENGTHS)
    requests = [Request(str(index), prompt, greedy(NEW_TOKENS)) for index, prompt in enumerate(prompts)]
    assert list(circumstance.run(engine, requests).values()) == by_transformers(family)
    assert circumstance.happened(engine), "the circumstance did not arise: this proved nothing"


def test_the_pool_of_the_same_bytes_holds_more_requests(models: Models, make_engine: MakeEngine) -> None:
    """Requests of several windows, which keep all tokens in one layer of three."""
    prompts = [[1 + (7 * row + place) % 60 for place in range(96)] for row in range(8)]
    most_running = {}
    for is_hybrid in (False, True):
        engine = make_engine(
            models.folder("gemma2"),
            enable_hybrid_kv_cache_manager=is_hybrid,
            enable_prefix_caching=False,
            max_num_batched_tokens=16,
        )
        bytes_per_block = engine.memory_use.kv_cache_bytes // engine.stats().kv_blocks_total
        shrink_pool(engine, (224 << 10) // bytes_per_block)
        for index, prompt in enumerate(prompts):
            engine.add_request(Request(str(index), prompt, greedy(20)))
        most_running[is_hybrid] = 0
        while engine.has_work():
            engine.step()
            engine.check_integrity()
            most_running[is_hybrid] = max(most_running[is_hybrid], engine.stats().num_requests_running)
        assert engine.stats().kv_blocks_used == 0
    assert most_running[True] > most_running[False]


@pytest.mark.parametrize("execution", ["plain", "overlapped"])
def test_no_block_is_lost_whoever_cancels_when(
    execution: str, models: Models, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(
        models.folder("gemma3"),
        execution=Execution(overlapped=execution == "overlapped"),
        enable_hybrid_kv_cache_manager=True,
        max_num_batched_tokens=24,
    )
    shrink_pool(engine, 8 * len(engine._blocks.windows), enable_prefix_caching=True)
    rng, live = random.Random(3), []
    base = Request("base", prompts_of((63,))[0], greedy(12))
    for step in range(120):
        if rng.random() < 0.5:
            live.append(f"r{step}")
            prompt = base.prompt_token_ids[: rng.randint(1, 63)]
            engine.add_request(replace(base, request_id=live[-1], prompt_token_ids=prompt, priority=rng.randint(-1, 1)))
        if live and rng.random() < 0.3:
            engine.abort(live.pop(rng.randrange(len(live))))
        engine.step()
        engine.check_integrity()
    for name in live:
        engine.abort(name)
    while engine.has_work():
        engine.step()
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().prefix_cache_hit_tokens_total > 0


def test_a_request_with_numbers_that_are_not_finite_leaves_nothing_behind(
    models: Models, make_engine: MakeEngine
) -> None:
    """Its blocks are zeroed in every group before another request gets them, which then answers as alone."""
    settings = {"enable_hybrid_kv_cache_manager": True, "max_num_batched_tokens": 17, "enable_prefix_caching": False}
    prompt = prompts_of((63,))[0]
    request = [Request("good", prompt, greedy(NEW_TOKENS))]
    expected = generate(make_engine(models.folder("gemma2"), **settings), request)
    engine = make_engine(models.folder("gemma2"), **settings)
    engine.add_request(Request("bad", prompt, greedy(NEW_TOKENS)))
    for _ in range(3):
        engine.step()
    [sequence] = engine._scheduler.running
    for block in engine._blocks.held_by(sequence):
        for layer in engine._runner._forward._cache.layers:
            layer[block] = float("nan")
    outputs = [output for _ in range(8) for output in engine.step()]
    assert [output.token_id for output in outputs] == [None]
    assert generate(engine, request) == expected
