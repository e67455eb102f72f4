"""Which decodes and checks share a call of torch, and that neither cuts nor padding change a result."""

from __future__ import annotations

import pytest
import torch

from millstream_runtime.engine.attention import side_by_side
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.decodes import GatheredTokens, StridedTokens
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.models.layers.attention import AttentionSpec
from tests.unit.engine.attention.test_paged_attention import cache_of, check, chunk, slots_of

EVEN = [chunk(1, 40, [start, start + 1, start + 2]) for start in (0, 4, 8)]
OTHERS = {
    "another length": [*EVEN, chunk(1, 39, [12, 13, 14])],
    "another distance": [*EVEN, chunk(1, 40, [13, 14, 15])],
    "backwards": EVEN[::-1],
    "scattered": [*EVEN[:2], chunk(1, 40, [8, 9, 30])],
    "another number of drafts": [check(2, 40, [0, 1, 2]), check(1, 40, [4, 5, 6])],
}


def test_sequences_of_one_length_an_equal_distance_apart_are_one_view() -> None:
    [(part, tokens)] = side_by_side.side_by_side(cache_of(2, 16), EVEN)
    assert part == slice(0, 3)
    assert isinstance(tokens, StridedTokens)


@pytest.mark.parametrize("chunks", OTHERS.values(), ids=OTHERS)
def test_all_others_are_gathered(chunks: list[AttentionChunk]) -> None:
    [(part, tokens)] = side_by_side.side_by_side(cache_of(2, 16), chunks)
    assert part == slice(0, len(chunks))
    assert isinstance(tokens, GatheredTokens)


MIXED = [chunk(1, length, [2 * row, 2 * row + 1]) for row, length in enumerate([3, 32, 17, 20, 31, 1])]
CHECKS = [check(drafts, 20 + drafts, [2 * row, 2 * row + 1]) for row, drafts in enumerate([1, 4, 2, 9])]


@pytest.mark.parametrize("chunks", [MIXED, CHECKS], ids=["decodes", "checks"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_copy_has_its_limit_and_cuts_change_no_result(
    chunks: list[AttentionChunk], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(2, 16)
    slots = torch.tensor(slots_of(chunks))
    query = torch.randn(len(slots), 4, 16, generator=torch.Generator().manual_seed(2))
    whole = TorchAttention(cache, slots, chunks).attend(0, query, AttentionSpec(0.25, window))
    monkeypatch.setattr(side_by_side, "GATHER_LIMIT_BYTES", 64 * cache.token_bytes)
    parts = [part for part, _ in side_by_side.side_by_side(cache, chunks)]
    assert len(parts) > 1
    assert [row for part in parts for row in range(len(chunks))[part]] == [*range(len(chunks))]
    for part in parts:
        assert max(one.context_len for one in chunks[part]) * len(chunks[part]) <= 64
    cut = TorchAttention(cache, slots, chunks).attend(0, query, AttentionSpec(0.25, window))
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)
