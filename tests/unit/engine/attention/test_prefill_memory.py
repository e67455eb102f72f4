"""What attention allocates for a prompt's chunk does not grow with chunk times context."""

from __future__ import annotations

import pytest
import torch

from millstream_runtime.engine.attention import prefill, scaled_dot_product
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.masks import causal_mask, mask_line
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.layers.attention import AttentionSpec
from tests.support.allocated_memory import peak_bytes
from tests.unit.engine.attention.test_paged_attention import BLOCK, SPECS, cache_of, slots_of

CHUNK, CONTEXT, HEADS, HEAD_DIM = 512, 8192, 6, 16
DENSE_MASK_BYTES = CHUNK * CONTEXT * 4  # 16 MiB: what a mask of the chunk would take
QUERY_BYTES = CHUNK * HEADS * HEAD_DIM * 4
SLACK_BYTES = 1 << 20  # the kernel's own, which is per thread


def attention_on(cache: KVCache, table: list[int], *, is_contiguous: bool) -> tuple[TorchAttention, list[int]]:
    chunk = AttentionChunk(CHUNK, CONTEXT, table, is_contiguous)
    slots = slots_of([chunk])
    return TorchAttention(cache, torch.tensor(slots), [chunk]), slots


@torch.inference_mode()
def allocated(cache: KVCache, spec: AttentionSpec, *, is_contiguous: bool) -> int:
    table = list(range(CONTEXT // BLOCK))
    attention, slots = attention_on(cache, table if is_contiguous else table[::-1], is_contiguous=is_contiguous)
    query = torch.randn(len(slots), HEADS, HEAD_DIM)
    key_value = torch.randn(len(slots), cache.heads[0].shape[0], HEAD_DIM)
    mask_line(CONTEXT, spec.window, torch.float32, torch.device("cpu"))  # kept from step to step
    return peak_bytes(lambda: [attention(0, query, key_value, spec) for _ in range(2)])


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("spec", [AttentionSpec(0.3), AttentionSpec(0.3, window=3000)], ids=["all", "window"])
def test_without_a_soft_cap_no_mask_is_made(spec: AttentionSpec, is_contiguous: bool) -> None:
    cache = cache_of(num_kv_heads=3, head_dim=HEAD_DIM, num_blocks=CONTEXT // BLOCK)
    copied_bytes = 0 if is_contiguous else cache.num_bytes
    num_bytes = allocated(cache, spec, is_contiguous=is_contiguous)
    assert num_bytes < copied_bytes + 4 * QUERY_BYTES + SLACK_BYTES
    assert num_bytes - copied_bytes < DENSE_MASK_BYTES // 4


@pytest.mark.parametrize("limit_bytes", [2 << 20, 8 << 20])
@pytest.mark.parametrize("window", [None, 3000])
def test_scores_of_a_soft_cap_stay_within_their_limit(
    window: int | None, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_dot_product, "SCORES_LIMIT_BYTES", limit_bytes)
    cache = cache_of(num_kv_heads=3, head_dim=HEAD_DIM, num_blocks=CONTEXT // BLOCK)
    num_bytes = allocated(cache, AttentionSpec(0.3, window, softcap=0.8), is_contiguous=True)
    assert num_bytes < limit_bytes + 4 * QUERY_BYTES + SLACK_BYTES


def test_masks_that_are_kept_for_the_layers_stay_within_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small chunks in one step: the masks of some are kept, and the others' made again for each layer."""
    monkeypatch.setattr(prefill, "MASK_LIMIT_BYTES", 300_000)
    cache = cache_of(num_kv_heads=3, head_dim=HEAD_DIM, num_blocks=256)
    chunks = [AttentionChunk(8, 500, range(32 * i, 32 * i + 32), is_contiguous=True) for i in range(8)]
    slots = slots_of(chunks)
    attention = TorchAttention(cache, torch.tensor(slots), chunks)
    query, key_value = torch.randn(len(slots), HEADS, HEAD_DIM), torch.randn(len(slots), 6, HEAD_DIM)

    def pass_layers() -> None:
        for window in (None, 40, 90):
            attention(0, query, key_value, AttentionSpec(0.3, window))

    assert peak_bytes(pass_layers) < 2 * 300_000 + SLACK_BYTES


@pytest.mark.parametrize("spec_name", SPECS)
def test_slabs_change_no_result(spec_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, spec = AttentionChunk(150, 230, range(15), is_contiguous=True), SPECS[spec_name]
    cache = cache_of(num_kv_heads=3, head_dim=HEAD_DIM)
    slots = slots_of([chunk])
    query, key_value = torch.randn(len(slots), HEADS, HEAD_DIM), torch.randn(len(slots), 6, HEAD_DIM)
    whole = TorchAttention(cache, torch.tensor(slots), [chunk])(0, query, key_value, spec)
    monkeypatch.setattr(prefill, "QUERIES_PER_SLAB", 7)
    monkeypatch.setattr(scaled_dot_product, "SCORES_LIMIT_BYTES", 20_000)
    cut = TorchAttention(cache, torch.tensor(slots), [chunk])(0, query, key_value, spec)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 30])
def test_a_mask_from_the_line_is_causal_within_its_window(window: int | None) -> None:
    mask = causal_mask(5, slice(3, 20), window, torch.empty(0))
    for row, position in enumerate(range(19, 14, -1)):
        seen = [key <= position and (window is None or key > position - window) for key in range(3, 20)]
        assert (mask[row] == 0).tolist() == seen
        assert (mask[row].isinf() | (mask[row] == 0)).all()
