"""Engines on a CPU that multiplies bfloat16 numbers, and those that hold them alone: one answer in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_kernels.cpu.bfloat16 import check as bfloat16_check
from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
from millstream_runtime.config import DType, SpeculationMethod
from millstream_runtime.engine.cpu import compiled_code
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, TokenLogprobs
from tests.support.bfloat16_operations import ExactOperations
from tests.support.engines import MakeEngine, generate, greedy

DEMO_MODEL = Path(__file__).resolve().parents[4] / "models" / "demo-chat"
POOL_BYTES = 16 << 20
needs_code = pytest.mark.skipif(compiled_code.load()[0] is None, reason="no kernels are compiled for this machine")
pytestmark = [needs_code, pytest.mark.deep]
Start = Callable[..., Engine]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """See `one_thread`."""


@pytest.fixture(params=["rounded products", "widened weights"])
def start(request: pytest.FixtureRequest, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts engines on the demo model in bfloat16: `start(**settings)`."""
    product = Bfloat16Product(ExactOperations(), 1, 2) if request.param == "rounded products" else None
    monkeypatch.setattr(bfloat16_check, "load", lambda: (product, None if product else "the CPU lacks it"))

    def make(**settings: Any) -> Engine:
        return make_engine(
            DEMO_MODEL, dtype=DType.BFLOAT16, **{"kv_cache_memory_bytes": POOL_BYTES, "max_model_len": 512} | settings
        )

    return make


def requests_of(count: int, new_tokens: int = 12) -> list[Request]:
    return [Request(str(index), [3 + index] * (5 + 17 * index), greedy(new_tokens)) for index in range(count)]


def logprobs_of(engine: Engine, requests: list[Request]) -> dict[str, list[TokenLogprobs]]:
    answers: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            if output.logprobs is not None:
                answers[output.request_id].append(output.logprobs)
    return answers


def test_an_answer_is_the_same_alone_in_company_in_chunks_and_behind_a_cached_prefix(start: Start) -> None:
    requests = requests_of(8)
    engine, cut = (start(enable_prefix_caching=False, max_num_batched_tokens=budget) for budget in (2048, 32))
    together = generate(engine, requests)
    assert generate(cut, requests) == together
    for request in requests:
        assert generate(engine, [request]) == {request.request_id: together[request.request_id]}
    cached = start()
    assert generate(cached, requests) == together
    assert generate(cached, requests) == together
    assert cached.stats().prefix_cache_hit_tokens_total > 100


def test_an_answer_is_the_same_after_a_preemption(start: Start) -> None:
    requests = requests_of(6, new_tokens=40)
    roomy = start(enable_prefix_caching=False)
    block_bytes = POOL_BYTES // roomy.stats().kv_blocks_total
    short_bytes = 14 * block_bytes
    short = start(enable_prefix_caching=False, kv_cache_memory_bytes=short_bytes, max_model_len=160)
    assert generate(short, requests) == generate(roomy, requests)
    assert short.stats().num_preemptions_total > 0


@pytest.mark.parametrize("method", [SpeculationMethod.DRAFT_MODEL, SpeculationMethod.EAGLE, SpeculationMethod.N_GRAM])
def test_drafts_change_no_token(method: SpeculationMethod, start: Start) -> None:
    folders = {SpeculationMethod.DRAFT_MODEL: "demo-draft", SpeculationMethod.EAGLE: "demo-eagle"}
    draft = str(DEMO_MODEL.with_name(folders[method])) if method in folders else None
    requests = requests_of(4, new_tokens=24)
    drafted = start(speculation_method=method, draft_model=draft)
    assert generate(drafted, requests) == generate(start(), requests)
    speculation = drafted.stats().speculation
    assert speculation is not None
    assert speculation.num_draft_tokens > 0


def test_a_pool_of_16_bits_holds_twice_the_tokens(start: Start, make_engine: MakeEngine) -> None:
    """It is so where products are rounded to 16 bits anyway."""
    wide = make_engine(DEMO_MODEL, kv_cache_memory_bytes=POOL_BYTES, max_model_len=512, dtype=DType.FLOAT32)
    rounds_products = bfloat16_check.load()[0] is not None
    assert start().stats().kv_blocks_total == (2 if rounds_products else 1) * wide.stats().kv_blocks_total


def test_ready_says_by_what_products_are_computed(start: Start) -> None:
    [linear] = [one for one in start().kernels if one.part == "dense_linear"]
    [rotation] = [one for one in start().kernels if one.part == "rope_kv_write"]
    assert rotation.backend.value == "numba"
    reason = linear.reason.partition("; prompts and large batches take up to twice as long")[
        0
    ]  # where there is AVX-512
    assert reason.endswith(("--dtype is bfloat16", "--dtype is bfloat16; the CPU lacks it"))
    is_rounded = "products of layers take and give bfloat16 (oneDNN)" in linear.reason
    assert is_rounded == (bfloat16_check.load()[0] is not None)


def test_log_probabilities_are_those_of_the_request_alone_to_the_last_bit(start: Start) -> None:
    engine = start(enable_prefix_caching=False)
    requests = [Request(str(index), [3 + index] * (5 + 17 * index), greedy(12, logprobs=3)) for index in range(8)]
    assert torch.get_num_threads() == 1
    together = logprobs_of(engine, requests)
    for request in requests:
        assert logprobs_of(engine, [request]) == {request.request_id: together[request.request_id]}
