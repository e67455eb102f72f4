"""What the engine promises with keys and values in 8 bits: the same answers in every circumstance, and healthy ones.

Full, windowed, capped and latent attention, in one block table and in several, with INT8 and with FP8. A request is
compared with itself alone in an engine of the same format: the format changes answers, company must not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.config import CAPABILITIES, Device, DType, KVCacheDType, RuntimeConfig
from millstream_runtime.distributed.leader import Leader
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution import shard_config
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.shard_config import _require_kv_format
from millstream_runtime.engine.request import FinishReason, Request, TokenOutput
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.quality.scored_model import ScoredModel
from tests.support.crowded import crowd
from tests.support.drafters import OftenRight
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.family_cases import CASES, dense
from tests.support.kv_numbers import spoil_blocks
from tests.support.pairs import every_pair
from tests.support.small_pool import shrink_pool
from tests.support.tape_recorder import TapeRecorder
from tests.support.tiny_families import write_family

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
QUANTIZED = (KVCacheDType.INT8, KVCacheDType.FP8)
WINDOW_TOKENS, NEW_TOKENS, VOCABULARY = 24, 20, 90
GROUPED = "windowed and full"
MODELS: dict[str, dict[str, Any]] = {
    "full": CASES["llama"].config,
    "windowed": dense("mistral", sliding_window=WINDOW_TOKENS),
    GROUPED: dense(
        "qwen2",
        use_sliding_window=True,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "capped": CASES["gemma2"].config,
    "latent": CASES["deepseek-v2"].config,
}
NO_TAPE = ("latent",)  # which rows an expert has is the host's decision: no tape holds it
NO_CACHE = {"enable_prefix_caching": False}
TIGHT_POOL_BLOCKS = 10  # the five requests begin with 12 and end with 17. A table per group takes twice as many


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in MODELS.items():
        made[name] = tmp_path_factory.mktemp("quantized")
        write_family(made[name], **config)
    return made


def make_requests() -> list[Request]:
    """Two begin with the same 32 tokens; prompts shorter and longer than the window."""
    rng = random.Random(6)
    tokens = [rng.randrange(2, VOCABULARY) for _ in range(120)]
    prompts = [tokens[:3], tokens[:37], [*tokens[:32], *tokens[60:75]], tokens[70:90], tokens[80:120]]
    return [Request(str(index), prompt, greedy(NEW_TOKENS)) for index, prompt in enumerate(prompts)]


Answers = dict[str, list[int]]


def together(engine: Engine) -> Answers:
    return generate(engine, make_requests())


def twice(engine: Engine) -> Answers:
    generate(engine, [replace(one, request_id=f"before-{one.request_id}") for one in make_requests()])
    answers = together(engine)
    assert engine.stats().prefix_cache_hit_tokens_total > 0
    return answers


def preempted(engine: Engine) -> Answers:
    num_groups = len(engine._blocks.windows)
    shrink_pool(engine, TIGHT_POOL_BLOCKS * num_groups, frees_outside_window=num_groups > 1)
    answers = together(engine)
    assert num_groups > 1 or engine.stats().num_preemptions_total > 0
    return answers


def in_small_chunks(engine: Engine) -> Answers:
    crowd(engine)
    return together(engine)


Way = tuple[Callable[[Engine], Answers], dict[str, Any], Callable[[], Execution | None]]
WAYS: dict[str, Way] = {
    "together": (together, NO_CACHE, lambda: None),
    "prefix hits": (twice, {}, lambda: None),
    "chunks of the budget": (together, NO_CACHE | {"max_num_batched_tokens": 17}, lambda: None),
    "small chunks beside answers": (in_small_chunks, NO_CACHE, lambda: None),
    "preempted": (preempted, NO_CACHE, lambda: None),
    "overlapped, with prefix hits": (twice, {}, lambda: Execution(overlapped=True)),
    "replayed": (together, NO_CACHE, lambda: Execution(TapeRecorder())),
    "replayed and overlapped, with prefix hits": (twice, {}, lambda: Execution(TapeRecorder(), overlapped=True)),
}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Callable[[str, KVCacheDType], Answers]:
    """Each request to its end in an engine without a prefix cache, one after another."""
    known: dict[tuple[str, KVCacheDType], Answers] = {}

    def answers(model: str, stored: KVCacheDType) -> Answers:
        if (model, stored) not in known:
            config = RuntimeConfig(
                model=str(folders[model]),
                served_model_name="alone",
                device=Device.CPU,
                kv_cache_memory_bytes=1 << 20,
                kv_cache_dtype=stored,
                enable_prefix_caching=False,
            )
            engine = Engine(config, lambda phase, message: None)
            known[model, stored] = {
                name: ids for one in make_requests() for name, ids in generate(engine, [one]).items()
            }
        return known[model, stored]

    return answers


def settings_for(model: str, stored: KVCacheDType) -> dict[str, Any]:
    return {"kv_cache_dtype": stored, "enable_hybrid_kv_cache_manager": model == GROUPED}


def execution_for(model: str, execution: Execution | None) -> Execution | None:
    if model in NO_TAPE and execution is not None and execution.recorder is not None:
        return replace(execution, recorder=EagerRecorder())
    return execution


@pytest.mark.matrix("model")
@pytest.mark.parametrize(("model", "way", "stored"), every_pair(MODELS, WAYS, QUANTIZED))
def test_a_request_is_answered_as_if_it_were_alone(
    model: str,
    stored: KVCacheDType,
    way: str,
    folders: dict[str, Path],
    make_engine: MakeEngine,
    alone: Callable[[str, KVCacheDType], Answers],
) -> None:
    run, settings, make_execution = WAYS[way]
    execution = execution_for(model, make_execution())
    engine = make_engine(folders[model], execution=execution, **settings_for(model, stored), **settings)
    assert (len(engine._blocks.windows) > 1) == (model == GROUPED)
    assert run(engine) == alone(model, stored)
    assert engine.graphs is None or engine.graphs.replayed_steps > 0


@pytest.mark.matrix("model")
@pytest.mark.parametrize(
    ("model", "way", "stored"),
    every_pair(MODELS, ["together", "prefix hits", "small chunks beside answers", "preempted"], QUANTIZED),
)
def test_drafts_change_no_token(
    model: str,
    stored: KVCacheDType,
    way: str,
    folders: dict[str, Path],
    make_engine: MakeEngine,
    alone: Callable[[str, KVCacheDType], Answers],
) -> None:
    """A draft that falls leaves quantized keys and values behind, which the next token overwrites."""
    run, settings, _ = WAYS[way]
    expected = alone(model, stored)
    drafter = OftenRight.about(make_requests(), expected, VOCABULARY)
    engine = make_engine(folders[model], drafter=drafter, **settings_for(model, stored), **settings)
    assert (len(engine._blocks.windows) > 1) == (model == GROUPED)
    assert run(engine) == expected
    counts = engine.stats().speculation
    assert counts is not None
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


@pytest.fixture(scope="module")
def pair() -> Iterator[Leader]:
    leader = Leader(2, torch.device("cpu"))
    yield leader
    leader.close()


@pytest.mark.deep
@pytest.mark.matrix("model")
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_answer_as_one(
    model: str,
    stored: KVCacheDType,
    folders: dict[str, Path],
    make_engine: MakeEngine,
    pair: Leader,
    alone: Callable[[str, KVCacheDType], Answers],
) -> None:
    engine = make_engine(folders[model], rank_group=pair, tensor_parallel_size=2, **settings_for(model, stored))
    assert twice(engine) == alone(model, stored)


@pytest.mark.matrix("model")
@pytest.mark.parametrize("stored", QUANTIZED)
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_near_those_of_the_full_precision(
    model: str, stored: KVCacheDType, folders: dict[str, Path]
) -> None:
    """Relative to how much logits differ among tokens. Random weights are no model: nothing averages errors out."""
    config = RuntimeConfig(model=str(folders[model]), served_model_name="test", device=Device.CPU, max_model_len=64)
    tokens = make_requests()[1].prompt_token_ids
    plain, quantized = (
        torch.cat([slab.logits for slab in ScoredModel(one).logits(tokens, 1)])
        for one in (config, replace(config, kv_cache_dtype=stored))
    )
    error = (plain - quantized).square().mean().sqrt() / plain.std()
    assert 0 < error < (0.03 if stored is KVCacheDType.INT8 else 0.12)


SICK = "1"


@pytest.mark.matrix("model")
@pytest.mark.parametrize(
    ("model", "stored", "mode", "is_scattered"),
    every_pair(MODELS, QUANTIZED, ["plain", "overlapped", "replayed and overlapped", "in small chunks"], [False, True]),
)
def test_bad_numbers_end_their_own_request_alone(
    model: str,
    stored: KVCacheDType,
    mode: str,
    is_scattered: bool,
    folders: dict[str, Path],
    make_engine: MakeEngine,
    alone: Callable[[str, KVCacheDType], Answers],
) -> None:
    """Every block begins with what an earlier request may have left: NaN. Then one running request becomes NaN."""
    overlapped, replayed = "overlapped" in mode, "replayed" in mode
    execution = execution_for(model, Execution(TapeRecorder() if replayed else None, overlapped=overlapped))
    engine = make_engine(folders[model], execution=execution, **settings_for(model, stored), **NO_CACHE)
    if mode == "in small chunks":
        crowd(engine)
    if is_scattered:
        shrink_pool(engine, 18 * len(engine._blocks.windows))
    cache = engine._runner._forward._cache
    spoil_blocks(cache, slice(0, cache.num_blocks))
    for one in make_requests():
        engine.add_request(one)
    outputs: list[TokenOutput] = []
    while engine.has_work() and sum(one.request_id == SICK for one in outputs) < 3:
        outputs += engine.step()
    assert all(one.finish_reason is None for one in outputs), "stale numbers reached a request"
    spoil_blocks(cache, engine._sequences[SICK].held_blocks)
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    expected = alone(model, stored)
    answers: Answers = {name: [] for name in expected}
    for output in outputs:
        answers[output.request_id] += [] if output.token_id is None else [output.token_id]
    assert {**answers, SICK: []} == {**expected, SICK: []}
    assert len(answers[SICK]) < NEW_TOKENS
    assert answers[SICK] == expected[SICK][: len(answers[SICK])]
    [last] = [one for one in outputs if one.request_id == SICK and one.finish_reason is not None]
    assert (last.token_id, last.finish_reason) == (None, FinishReason.ERROR)
    assert together(engine) == expected, "and the blocks are as good as new"


@pytest.mark.parametrize(("stored", "least"), [(KVCacheDType.INT8, 1.9), (KVCacheDType.FP8, 2.0)])
def test_the_same_bytes_hold_more_tokens_than_16_bits(
    stored: KVCacheDType, least: float, make_engine: MakeEngine, tmp_path: Path
) -> None:
    write_family(tmp_path, **dense("llama", head_dim=64, max_position_embeddings=8192))
    pool: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "dtype": DType.BFLOAT16, "max_model_len": 256}
    plain, quantized = (
        make_engine(tmp_path, kv_cache_dtype=one, **pool).memory_use for one in (KVCacheDType.AUTO, stored)
    )
    assert quantized.kv_cache_tokens >= least * plain.kv_cache_tokens
    assert 0.99 * plain.kv_cache_bytes <= quantized.kv_cache_bytes <= 8 << 20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stored", KVCacheDType)
def test_every_format_is_served_on_every_device(stored: KVCacheDType, device: str) -> None:
    _require_kv_format(stored, torch.device(device))


@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_device_without_a_format_is_refused_by_name_before_a_weight_is_read(
    stored: KVCacheDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = replace(CAPABILITIES, kv_cache_methods=frozenset({"None"}))
    monkeypatch.setattr(shard_config, "CAPABILITIES", without)
    words = rf"--kv-cache-dtype is '{stored}'.* on cuda; leave it out .*--device cpu"
    with pytest.raises(RuntimeFailure, match=words) as refused:
        _require_kv_format(stored, torch.device("cuda"))
    assert refused.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
    _require_kv_format(KVCacheDType.AUTO, torch.device("cuda"))
