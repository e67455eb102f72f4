"""Engines answer with the same tokens whether torch or the compiled kernel attends to their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_kernels.cpu.decode import load
from millstream_runtime.config import DType, KVCacheDType
from millstream_runtime.engine.attention import compiled_prompts
from millstream_runtime.engine.attention.compiled_prompts import CompiledPrompts
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.models.layers.attention import AttentionSpec
from tests.support.engines import MakeEngine, generate
from tests.support.family_cases import CASES as FAMILIES
from tests.support.tiny_families import write_family
from tests.unit.engine.attention.test_paged_attention import SPECS, cache_of, chunk

DEMO_MODEL = Path(__file__).parents[4] / "models" / "demo-chat"
GREEDY = SamplingParams(8, temperature=0.0, ignore_eos=True)
ATTENTIONS = ("llama", "mistral", "gemma2", "gemma3", "qwen3", "phi3", "deepseek-v3", "llama-ratio-6-head-80")


def requests_of(*num_tokens: int) -> list[Request]:
    """Prompts that begin differently."""
    return [
        Request(str(number), [2 + (7 * number + 3 * place) % 60 for place in range(count)], GREEDY)
        for number, count in enumerate(num_tokens)
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the compiled kernel had."""
    counts: list[int] = []
    attend = CompiledPrompts.__call__

    def counted(self: CompiledPrompts, pool: LayerPool, query: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        counts.append(len(query))
        return attend(self, pool, query, spec)

    monkeypatch.setattr(CompiledPrompts, "__call__", counted)
    return counts


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_prompts, "unsupported", lambda dtype: "it is off")


@pytest.mark.deep
@pytest.mark.parametrize("stored", [KVCacheDType.AUTO, KVCacheDType.INT8])
def test_the_demo_model_answers_with_the_same_tokens(
    stored: KVCacheDType, calls: list[int], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, and chunks of up to 64 tokens of one that is longer. In float32: both sides sum in another order,
    which 16 bits of products would make larger."""
    settings: dict[str, Any] = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 16 << 20}
    settings |= {"kv_cache_dtype": stored, "dtype": DType.FLOAT32}
    requests = requests_of(3, 40, 150)
    compiled = generate(make_engine(DEMO_MODEL, **settings), requests)
    num_calls = len(calls)
    assert num_calls > 0
    by_torch(monkeypatch)
    assert generate(make_engine(DEMO_MODEL, **settings), requests) == compiled
    assert len(calls) == num_calls, "none by torch"


@pytest.mark.matrix
@pytest.mark.parametrize("family", ATTENTIONS)
def test_families_answer_with_the_same_tokens(
    family: str, calls: list[int], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Windows, soft caps, latent keys and groups of heads, in float32."""
    write_family(tmp_path, **FAMILIES[family].config)
    requests = requests_of(5, 20, 37)
    compiled = generate(make_engine(tmp_path, max_num_batched_tokens=32), requests)
    num_calls = len(calls)
    assert num_calls > 0
    by_torch(monkeypatch)
    assert generate(make_engine(tmp_path, max_num_batched_tokens=32), requests) == compiled
    assert len(calls) == num_calls


@pytest.mark.parametrize("spec_name", SPECS)
def test_a_chunk_has_the_same_bits_beside_decodes_and_cut_in_two(spec_name: str) -> None:
    cache, no_slots, table = cache_of(2, 16), torch.zeros(0, dtype=torch.int64), [9, 2, 30, 7, 5, 40]
    query = torch.randn(70, 6, 16, generator=torch.Generator().manual_seed(2))

    def attended(*chunks: tuple[int, int], rows: slice) -> torch.Tensor:
        parts = [chunk(own, length, table) for own, length in chunks]
        return TorchAttention(cache, no_slots, parts, code=load()).attend(0, query[rows], SPECS[spec_name])

    together = attended((70, 90), rows=slice(0, 70))
    cut = torch.cat([attended((23, 43), rows=slice(0, 23)), attended((47, 90), rows=slice(23, 70))])
    assert torch.equal(cut, together)
    company = attended((1, 11), (23, 43), (46, 89), rows=slice(0, 70))
    alone = attended((23, 43), rows=slice(1, 24))
    assert torch.equal(company[1:24], alone)
