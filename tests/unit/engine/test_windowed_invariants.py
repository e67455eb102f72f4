"""A request's tokens depend on the request alone, also where layers attend to a sliding window.

A window frees blocks of a sequence that still runs. So the states that a block passes through differ from those of a
full model, in every execution mode: prompts whole or in small chunks; chunks longer than the window.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request
from tests.support.crowded import crowd
from tests.support.drafters import OftenRight
from tests.support.drafting_engines import N_GRAMS
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.family_cases import dense
from tests.support.small_pool import shrink_pool
from tests.support.tiny_families import write_family
from tests.support.ways import speculates

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
WINDOW_TOKENS, NEW_TOKENS, VOCABULARY = 24, 20, 96
MIXED = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "every layer windowed": dense("mistral", sliding_window=WINDOW_TOKENS),
    "windowed and full layers": dense(
        "qwen2", use_sliding_window=True, sliding_window=WINDOW_TOKENS, layer_types=MIXED
    ),
    "two windowed layers for each full one": dense(
        "qwen2",
        num_hidden_layers=6,
        use_sliding_window=True,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "no layer windowed": dense("mistral", sliding_window=None),
}
NUM_GROUPS = {"windowed and full layers": 2, "two windowed layers for each full one": 3}  # block tables of a sequence
CHUNK_TOKENS = 40  # longer than the window, and no whole number of blocks
POOL_BLOCKS, GROUP_BLOCKS = 24, 9  # too few for four requests
EXECUTIONS: dict[str, Callable[[], Execution]] = {
    "plain": Execution,
    "overlapped": lambda: Execution(overlapped=True),
    "replayed": lambda: Execution(EagerRecorder()),
    "replayed and overlapped": lambda: Execution(EagerRecorder(), overlapped=True),
    "in small chunks": Execution,
    "in small chunks, overlapped": lambda: Execution(overlapped=True),
    "speculating": Execution,
    "speculating, replayed and overlapped": lambda: Execution(EagerRecorder(), overlapped=True),
    "speculating by n-grams": Execution,
}
CROWDED = ("in small chunks", "in small chunks, overlapped")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in MODELS.items():
        made[name] = tmp_path_factory.mktemp("windowed")
        write_family(made[name], **config)
    return made


def make_requests() -> list[Request]:
    """Twelve requests; most begin with tokens of others, and most prompts are longer than the window."""
    rng = random.Random(5)
    tokens = [rng.randrange(3, VOCABULARY) for _ in range(80)]
    prompts = [tokens[:length] for length in (80, 64, 33, 17)]
    prompts += [[*tokens[:shared], *(rng.randrange(3, VOCABULARY) for _ in range(own))] for shared, own in SHARED]
    return [Request(str(index), prompt, greedy(NEW_TOKENS)) for index, prompt in enumerate(prompts)]


SHARED = ((48, 20), (32, 40), (64, 7), (0, 75), (0, 50), (16, 64), (48, 1), (0, 3))


def in_random_company(engine: Engine, requests: list[Request], seed: int) -> dict[str, list[int]]:
    """Join in random order among the same prompts under other names, which are cancelled at random."""
    rng = random.Random(seed)
    answers: dict[str, list[int]] = {one.request_id: [] for one in requests}
    waiting, company, step = rng.sample(requests, len(requests)), 0, 0
    while waiting or engine.has_work():
        if waiting and step % 2 == 0:
            engine.add_request(waiting.pop())
        if waiting and rng.random() < 0.4:
            company += 1
            engine.add_request(replace(rng.choice(requests), request_id=f"stranger-{company}"))
        if company and rng.random() < 0.3:
            engine.abort(f"stranger-{rng.randint(1, company)}")
        for output in engine.step():
            if output.request_id in answers:
                assert output.token_id is not None
                answers[output.request_id].append(output.token_id)
        engine.check_integrity()
        step += 1
    assert engine.stats().kv_blocks_used == 0
    return answers


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Callable[[str, MakeEngine], dict[str, list[int]]]:
    known: dict[str, dict[str, list[int]]] = {}

    def answers(model: str, make_engine: MakeEngine) -> dict[str, list[int]]:
        if model not in known:
            engine = make_engine(folders[model], enable_prefix_caching=False)
            known[model] = {name: ids for one in make_requests() for name, ids in generate(engine, [one]).items()}
        return known[model]

    return answers


@pytest.mark.matrix("model", "is_hybrid")
@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    ("model", "is_hybrid"), [*((model, False) for model in MODELS), *((one, True) for one in NUM_GROUPS)]
)
def test_a_request_is_answered_as_if_it_were_alone(
    model: str,
    is_hybrid: bool,
    execution: str,
    is_cached: bool,
    folders: dict[str, Path],
    make_engine: MakeEngine,
    alone: Callable[[str, MakeEngine], dict[str, list[int]]],
) -> None:
    by_n_grams, drafts = "n-grams" in execution, "speculating" in execution
    knows = OftenRight.about(make_requests(), alone(model, make_engine), VOCABULARY)
    engine = make_engine(
        folders[model],
        execution=EXECUTIONS[execution](),
        drafter=knows if drafts and not by_n_grams else None,
        **(N_GRAMS if by_n_grams else {}),
        enable_prefix_caching=is_cached,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK_TOKENS if is_hybrid else 2048,
        enable_hybrid_kv_cache_manager=is_hybrid,
    )
    assert len(engine._blocks.windows) == (NUM_GROUPS[model] if is_hybrid else 1)
    if execution in CROWDED:
        crowd(engine, prompt_tokens=41)  # longer than the window, and no whole number of blocks
    pool_blocks = GROUP_BLOCKS * NUM_GROUPS[model] if is_hybrid else POOL_BLOCKS
    shrink_pool(engine, pool_blocks, enable_prefix_caching=is_cached)
    for seed in range(3):
        assert in_random_company(engine, make_requests(), seed) == alone(model, make_engine)
    assert engine.stats().prefix_cache_hit_tokens_total > 0 or not is_cached
    assert engine.stats().num_preemptions_total > 0 or not is_hybrid
    assert speculates(engine) or not drafts
