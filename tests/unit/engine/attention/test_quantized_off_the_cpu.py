"""Keys and values in 8 bits by torch elsewhere than on a CPU: right numbers, and nothing that waits for the device.

On torch's meta device there is nothing to read: what would wait for a GPU, or cannot be recorded by a graph, fails.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine.attention.decodes import DecodeCall, GatheredTokens
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.attention.side_by_side import GATHER_LIMIT_BYTES, side_by_side
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.graphs.static_decode import StaticAttention, StaticDecode
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.layers.attention import AttentionSpec
from tests.support.kv_numbers import spoil_blocks
from tests.unit.engine.attention.test_paged_attention import BLOCK, chunk, config_of, naive, slots_of
from tests.unit.engine.execution.graphs.test_static_decode import Tables, chunk_input

META, CPU = torch.device("meta"), torch.device("cpu")
QUANTIZED = (KVCacheDType.INT8, KVCacheDType.FP8)
KV_HEADS, HEADS, HEAD_DIM, BLOCKS = 2, 4, 16, 20
SPECS = [AttentionSpec(0.25), AttentionSpec(0.25, window=7), AttentionSpec(0.25, window=20, softcap=5.0)]
STEPS = {
    "decodes": [chunk(1, 33, [0, 1, 2]), chunk(1, 5, [9]), chunk(1, 17, [4, 11])],
    "a check of drafts": [chunk(4, 30, [3, 7], num_drafts=3)],
    "a prompt": [chunk(40, 40, [5, 6, 7])],
    "a prompt behind others, in scattered blocks": [chunk(20, 45, [9, 1, 14])],
}


def cache_of(stored: KVCacheDType, device: torch.device, num_blocks: int = BLOCKS) -> KVCache:
    scales = [(0.02, 0.03)] if stored is KVCacheDType.FP8 else []
    config = config_of(KV_HEADS, HEAD_DIM)
    return KVCache(
        config, num_blocks, BLOCK, torch.float32, device, stored=stored, fp8_scales=scales, num_padding_blocks=2
    )


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("stored", QUANTIZED)
def test_gathered_decodes_equal_the_reference_whatever_lies_behind_a_request(
    stored: KVCacheDType, spec: AttentionSpec
) -> None:
    cache, chunks = cache_of(stored, CPU), STEPS["decodes"]
    spoil_blocks(cache, slice(None))
    pool, query = cache.layer(0), numbers(3, HEADS, HEAD_DIM)
    expected = []
    for row, one in enumerate(chunks):
        positions = torch.arange(one.context_len)
        slots = torch.tensor(one.block_table)[positions // BLOCK] * BLOCK + positions % BLOCK
        pool.write(slots, numbers(one.context_len, 2 * KV_HEADS, HEAD_DIM))
        tokens = torch.cat([pool.between(slot, slot + 1) for slot in slots.tolist()], dim=1).transpose(0, 1)
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in tokens.chunk(2, dim=1))
        expected.append(naive(query[row : row + 1], keys, values, spec))
    call = DecodeCall(GatheredTokens(cache, chunks), 0)
    attended = call(pool, query.view(3, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM), spec)
    torch.testing.assert_close(attended.flatten(1, 2), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("stored", QUANTIZED)
def test_no_step_waits_for_the_device(stored: KVCacheDType, step: str, spec: AttentionSpec) -> None:
    cache, chunks = cache_of(stored, META), STEPS[step]
    slots = torch.tensor(slots_of(chunks), device=META)
    query, key_value = (torch.empty(len(slots), heads, HEAD_DIM, device=META) for heads in (HEADS, 2 * KV_HEADS))
    attended = TorchAttention(cache, slots, chunks)(0, query, key_value, spec)
    assert (attended.device.type, attended.shape) == ("meta", (len(slots), HEADS * HEAD_DIM))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_padded_step_can_be_recorded(stored: KVCacheDType, spec: AttentionSpec) -> None:
    cache, bucket = cache_of(stored, META), Bucket(5, 4)
    static = StaticDecode(Tables(), cache, [bucket])  # type: ignore[arg-type]
    buffers = static.fill(bucket, StepInput([7], [chunk_input(60, [3, 9, 5, 6])], []))
    query, key_value = (torch.empty(5, heads, HEAD_DIM, device=META) for heads in (HEADS, 2 * KV_HEADS))
    attended = StaticAttention(cache, buffers)(0, query, key_value, spec)
    assert (attended.device.type, attended.shape) == ("meta", (5, HEADS * HEAD_DIM))


@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_call_copies_no_more_than_the_limit_with_what_dequantizing_takes(stored: KVCacheDType) -> None:
    cache = cache_of(stored, META)
    long = 100_000
    table = [0] * -(-long // BLOCK)
    parts = [part for part, _ in side_by_side(cache, [chunk(1, long, table) for _ in range(8)])]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert all(before.stop == after.start for before, after in pairwise(parts))
    rows = max(part.stop - part.start for part in parts)
    assert rows == GATHER_LIMIT_BYTES // (cache.copied_token_bytes * long)
    assert cache.copied_token_bytes > cache.token_bytes
