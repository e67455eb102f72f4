"""Numbers that are not finite, anywhere in the pool but in a request's own context, change nothing for that request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.graphs.static_decode import StaticAttention, StaticDecode
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from tests.support.pairs import every_pair
from tests.unit.engine.attention.test_paged_attention import BLOCK, CASES, SPECS, cache_of, slots_of
from tests.unit.engine.execution.graphs.test_static_decode import BUCKETS, TABLES, Tables, chunk_input, padded

BAD = {"NaN": float("nan"), "infinity": float("inf")}


def pool_of(latent_dim: int | None) -> KVCache:
    cache = cache_of(num_kv_heads=3, head_dim=16)
    if latent_dim:
        cache.heads = [heads[:1].contiguous() for heads in cache.heads]
        cache.layers = [heads.view(1, -1, BLOCK, 16).permute(1, 2, 0, 3) for heads in cache.heads]
    return cache


def context_slots(chunks: list[AttentionChunk]) -> list[int]:
    return slots_of([replace(one, num_tokens=one.context_len) for one in chunks])


def poisoned(cache: KVCache, kept_slots: list[int], value: float) -> KVCache:
    """The pool with `value` everywhere but in some slots."""
    kept = cache.heads[0][:, kept_slots].clone()
    cache.heads[0].fill_(value)
    cache.heads[0][:, kept_slots] = kept
    return cache


@pytest.mark.matrix("name")
@pytest.mark.parametrize(("name", "spec_name", "latent_dim", "bad"), every_pair(CASES, SPECS, [None, 10], BAD))
def test_in_every_plan(
    name: str, spec_name: str, latent_dim: int | None, bad: str, compiled_code: LoadedCode | None
) -> None:
    chunks, spec = CASES[name], replace(SPECS[spec_name], latent_dim=latent_dim)
    cache, generator = pool_of(latent_dim), torch.Generator().manual_seed(2)
    slots = slots_of(chunks)
    query = torch.randn(len(slots), 6, 16, generator=generator)
    key_value = torch.randn(len(slots), cache.heads[0].shape[0], 16, generator=generator)
    expected = TorchAttention(cache, torch.tensor(slots), chunks, code=compiled_code)(0, query, key_value, spec)
    poisoned(cache, context_slots(chunks), BAD[bad])
    attended = TorchAttention(cache, torch.tensor(slots), chunks, code=compiled_code)(0, query, key_value, spec)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.matrix("name")
@pytest.mark.parametrize("name", [name for name, chunks in CASES.items() if len(chunks) > 1])
@pytest.mark.parametrize("spec_name", SPECS)
def test_in_the_context_of_another_request_of_the_step(
    name: str, spec_name: str, compiled_code: LoadedCode | None
) -> None:
    chunks, spec = CASES[name], SPECS[spec_name]
    cache, generator = pool_of(None), torch.Generator().manual_seed(2)
    slots = torch.tensor(slots_of(chunks))
    query = torch.randn(len(slots), 6, 16, generator=generator)
    key_value = torch.randn(len(slots), cache.heads[0].shape[0], 16, generator=generator)
    expected = TorchAttention(cache, slots, chunks, code=compiled_code)(0, query, key_value, spec)
    sick = slice(-chunks[-1].num_tokens, None)
    key_value[sick] = float("nan")
    attended = TorchAttention(cache, slots, chunks, code=compiled_code)(0, query, key_value, spec)
    torch.testing.assert_close(attended[: sick.start], expected[: sick.start], rtol=1e-5, atol=1e-5)
    assert attended[sick].isnan().all(), "what went wrong is seen by its own request"


@pytest.mark.matrix("name")
@pytest.mark.parametrize(
    ("name", "spec_name", "latent_dim", "bucket", "bad"), every_pair(TABLES, SPECS, [None, 10], BUCKETS, BAD)
)
def test_in_padded_decodes(name: str, spec_name: str, latent_dim: int | None, bucket: Bucket, bad: str) -> None:
    rows, spec = TABLES[name], replace(SPECS[spec_name], latent_dim=latent_dim)
    cache, generator = padded(pool_of(latent_dim)), torch.Generator().manual_seed(2)
    static = StaticDecode(Tables(), cache, BUCKETS)  # type: ignore[arg-type]
    buffers = static.fill(bucket, StepInput([7] * len(rows), [chunk_input(*row) for row in rows], []))
    query = torch.randn(bucket.rows, 6, 16, generator=generator)
    key_value = torch.randn(bucket.rows, cache.heads[0].shape[0], 16, generator=generator)
    expected = StaticAttention(cache, buffers)(0, query, key_value, spec)
    chunks = [AttentionChunk(1, length, table, is_contiguous=False) for length, table in rows]
    zeros = range(cache.zero_block * BLOCK, (cache.zero_block + 1) * BLOCK)
    poisoned(cache, [*context_slots(chunks), *zeros], BAD[bad])
    attended = StaticAttention(cache, buffers)(0, query, key_value, spec)
    torch.testing.assert_close(attended[: len(rows)], expected[: len(rows)], rtol=1e-5, atol=1e-5)
