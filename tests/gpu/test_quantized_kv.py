"""On a GPU: keys and values in 8 bits. torch has the same tokens eagerly, by graphs and overlapped; kernels read codes.

On a CPU `tests/unit/engine/test_quantized_kv.py` and `tests/unit/kernels/test_quantized_attention.py` prove the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millstream_kernels.attention.decode import paged_decode_attention
from millstream_kernels.attention.prefill import paged_prefill_attention
from millstream_kernels.stored_as import StoredAs
from millstream_runtime.config import DType, KVCacheDType
from millstream_runtime.engine.request import SamplingParams
from tests.gpu.test_execution import EXECUTIONS, GREEDY, SEEDED, answers_of, engine_of
from tests.support.paged_cases import Filled, Paged, assert_as_good_as_torch, make
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu
QUANTIZED = (KVCacheDType.INT8, KVCacheDType.FP8)
FORMATS = (StoredAs.INT8, StoredAs.E4M3)
BF16, FP16 = torch.bfloat16, torch.float16
DECODES = [
    Paged((1, 16, 17, 1500), (1, 1, 1, 1), 32, 8, 128, BF16),
    Paged((700, 80, 17), (5, 17, 17), 4, 2, 64, BF16),
    Paged((1400, 30), (1, 4), 4, 2, 128, FP16, window=700),
    Paged((1000, 5), (1, 2), 4, 2, 256, BF16, softcap=50.0),
]
PROMPTS = [
    Paged((64, 700), (64, 650), 32, 8, 128, BF16),
    Paged((900, 30), (200, 30), 4, 2, 128, BF16, window=330),
    Paged((300,), (90,), 4, 2, 256, BF16, window=40, softcap=50.0),
]
CASES = [(paged_decode_attention, case) for case in DECODES] + [(paged_prefill_attention, case) for case in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("how", [name for name in EXECUTIONS if name != "eager"])
@pytest.mark.parametrize("stored", QUANTIZED)
def test_the_same_tokens_in_float32(stored: KVCacheDType, how: str, sampling: SamplingParams, folder: Path) -> None:
    expected = answers_of(engine_of(folder, "eager", kv_cache_dtype=stored), sampling)
    engine = engine_of(folder, how, kv_cache_dtype=stored)
    for _ in range(2):
        assert answers_of(engine, sampling) == expected
    assert "graphs" not in how or (engine.graphs is not None and engine.graphs.replayed_steps > 0)


@pytest.mark.parametrize("stored", QUANTIZED)
def test_the_same_bytes_hold_more_tokens(stored: KVCacheDType, folder: Path) -> None:
    plain, quantized = (
        engine_of(folder, "eager", DType.BFLOAT16, kv_cache_dtype=one).memory_use.kv_cache_tokens
        for one in (KVCacheDType.AUTO, stored)
    )
    assert quantized > 1.6 * plain  # heads are small, and INT8 has a scale for each


def on_gpu(filled: Filled) -> Filled:
    requests = filled.requests
    moved = {name: getattr(requests, name).cuda() for name in ("tables", "lengths", "query_starts")}
    scales = None if filled.kv_scales is None else filled.kv_scales.cuda()
    own = replace(filled, query=filled.query.cuda(), pool=filled.pool.cuda(), kv_scales=scales)
    return replace(own, requests=replace(requests, **moved))


@pytest.mark.parametrize("stored_as", FORMATS)
@pytest.mark.parametrize(("kernel", "case"), CASES, ids=lambda one: one.__name__ if callable(one) else str(one))
def test_kernels_are_as_good_as_torch(kernel: Callable[..., Tensor], case: Paged, stored_as: StoredAs) -> None:
    filled = make(replace(case, stored_as=stored_as))
    own = on_gpu(filled)
    result = kernel(own.query, own.pool, own.requests, case.scores, kv_scales=own.kv_scales)
    assert_as_good_as_torch(result.cpu(), filled)


@pytest.mark.parametrize("stored_as", FORMATS)
def test_a_row_has_one_result(stored_as: StoredAs) -> None:
    """Alone, in company, and as a row of a draft's check."""
    lengths, queries = (700, 40, 1300), (5, 1, 3)
    together = on_gpu(make(Paged(lengths, queries, 32, 8, 128, BF16, stored_as=stored_as)))
    scores = together.case.scores
    expected = paged_decode_attention(
        together.query, together.pool, together.requests, scores, kv_scales=together.kv_scales
    )
    for request, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        for place in range(count):
            own_length, row = length - count + 1 + place, together.rows(request).start + place
            requests = replace(
                together.requests,
                tables=together.requests.tables[request : request + 1].clone(),
                lengths=torch.tensor([own_length], dtype=torch.int32, device="cuda"),
                query_starts=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
                max_queries=1,
                max_length=own_length,
            )
            query = together.query[row : row + 1].clone()
            alone = paged_decode_attention(query, together.pool, requests, scores, kv_scales=together.kv_scales)
            assert torch.equal(alone[0], expected[row]), f"request {request}, row {place}"
