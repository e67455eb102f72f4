"""What is read of keys and values that were written: themselves, or nearly so where they are quantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.kv_formats import kv_token_bytes
from tests.support.kv_numbers import spoil_blocks
from tests.unit.engine.attention.test_paged_attention import config_of

BLOCK, HEADS, HEAD_DIM, NUM_BLOCKS = 16, 2, 64, 8
CPU = torch.device("cpu")
QUANTIZED = (KVCacheDType.INT8, KVCacheDType.FP8)
SLOTS = torch.tensor([3, 4, 5, 40, 127])  # of three blocks, the last slot too


def cache(stored: KVCacheDType, dtype: torch.dtype = torch.float32, **arguments: Any) -> KVCache:
    return KVCache(config_of(HEADS, HEAD_DIM), NUM_BLOCKS, BLOCK, dtype, CPU, stored=stored, **arguments)


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    """`[T, heads, D]`; heads and tokens of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([1e-3, 0.1, 1.0, 10.0])[None, :, None] * torch.tensor([1.0, 2.0, 0.5, 1.0, 8.0])[:, None, None]
    return (torch.randn(len(SLOTS), 2 * HEADS, HEAD_DIM, generator=generator) * sizes).to(dtype)


def read(pool_of: KVCache, slots: Tensor = SLOTS) -> Tensor:
    """`[T, heads, D]`."""
    return pool_of.layer(0).between(0, NUM_BLOCKS * BLOCK)[:, slots].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", KVCacheDType)
def test_numbers_come_back_within_the_rounding_of_their_format(stored: KVCacheDType, dtype: torch.dtype) -> None:
    written, pool = numbers(dtype), cache(stored, dtype)
    pool.layer(0).write(SLOTS, written)
    found = read(pool)
    assert found.dtype == dtype
    difference = (found.double() - written.double()).abs()
    rounding = torch.finfo(dtype).eps * written.double().abs()
    if stored is KVCacheDType.AUTO:
        assert torch.equal(found, written)
    elif stored is KVCacheDType.INT8:  # half a step, and the last step's share of the scale's own rounding
        step = written.double().abs().amax(dim=-1, keepdim=True) / 127
        assert (difference <= step * 0.57 + rounding).all()
    else:  # three bits behind the first; below 2^-6 steps of 2^-9
        assert (difference <= written.double().abs() / 16 + 2**-10 + rounding).all()
    assert stored is KVCacheDType.AUTO or (difference > 0).any()


@pytest.mark.parametrize("stored", KVCacheDType)
def test_runs_of_blocks_are_what_lies_between_slots(stored: KVCacheDType) -> None:
    pool = cache(stored, fp8_scales=[(0.5, 2.0)])
    pool.layer(0).write(torch.arange(NUM_BLOCKS * BLOCK), torch.randn(NUM_BLOCKS * BLOCK, 2 * HEADS, HEAD_DIM))
    heads, blocks = torch.tensor([0, 3, 2, 0]), torch.tensor([7, 0, 2, 3])
    runs = pool.layer(0).runs(heads * NUM_BLOCKS + blocks, BLOCK).view(-1, BLOCK, HEAD_DIM)
    for run, head, block in zip(runs, heads.tolist(), blocks.tolist(), strict=True):
        assert torch.equal(run, pool.layer(0).between(block * BLOCK, (block + 1) * BLOCK)[head])


def test_an_int8_scale_is_of_one_token_and_head_alone() -> None:
    """So what a token's neighbours are changes nothing of it."""
    alone, together = cache(KVCacheDType.INT8), cache(KVCacheDType.INT8)
    written = numbers()
    together.layer(0).write(SLOTS, written)
    for index in range(len(SLOTS)):
        alone.layer(0).write(SLOTS[index : index + 1], written[index : index + 1])
    assert torch.equal(read(alone), read(together))


@pytest.mark.parametrize("size", [0.0, 1e-12, 3e-6])
def test_int8_numbers_that_a_scale_cannot_tell_from_zero_stay_small(size: float) -> None:
    pool = cache(KVCacheDType.INT8)
    pool.layer(0).write(SLOTS, torch.full((len(SLOTS), 2 * HEADS, HEAD_DIM), size))
    assert (read(pool) - size).abs().max() <= 127 * 2**-25


def test_fp8_scales_widen_the_range_of_keys_and_of_values_each_by_its_own() -> None:
    written = torch.full((len(SLOTS), 2 * HEADS, HEAD_DIM), 1000.0)
    plain, scaled = cache(KVCacheDType.FP8), cache(KVCacheDType.FP8, fp8_scales=[(4.0, 1.0)])
    for pool in (plain, scaled):
        pool.layer(0).write(SLOTS, written)
    assert (read(plain) == 448).all(), "the largest number of the format"
    assert (read(scaled)[:, HEADS:] == 448).all()
    assert ((read(scaled)[:, :HEADS] - 1000).abs() <= 1000 / 16).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stored", QUANTIZED)
def test_a_bad_number_is_seen_by_its_own_token_and_head_alone(stored: KVCacheDType, bad: float) -> None:
    written, pool, clean = numbers(), cache(stored), cache(stored)
    clean.layer(0).write(SLOTS, written)
    written[2, 1, 7] = bad
    pool.layer(0).write(SLOTS, written)
    found, expected = read(pool), read(clean)
    assert not found[2, 1].isfinite().all()
    found[2, 1] = expected[2, 1] = 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize("stored", KVCacheDType)
def test_zeroed_blocks_hold_zeros_and_others_stay(stored: KVCacheDType) -> None:
    pool = cache(stored)
    pool.layer(0).write(SLOTS, numbers())
    before = read(pool)
    spoil_blocks(pool, [0, 7])
    assert not read(pool)[:3].isfinite().any()
    pool.zero_blocks([0, 7])
    found = read(pool)
    assert (found[[0, 1, 2, 4]] == 0).all()
    assert torch.equal(found[3], before[3])
    pool.layer(0).write(SLOTS, numbers())
    assert torch.equal(read(pool), before), "and they are as good as new"


@pytest.mark.parametrize("stored", KVCacheDType)
def test_the_pool_takes_the_bytes_that_are_counted_for_its_tokens(stored: KVCacheDType) -> None:
    token_bytes = kv_token_bytes(stored.method, 2 * HEADS, HEAD_DIM, 4)
    assert cache(stored).num_bytes == NUM_BLOCKS * BLOCK * token_bytes


def test_int8_holds_nearly_twice_the_tokens_of_16_bits() -> None:
    for head_dim in (64, 128, 576):
        ratio = kv_token_bytes("None", 2, head_dim, 2) / kv_token_bytes("INT8", 2, head_dim, 2)
        assert 1.9 <= ratio <= 2
