"""On a GPU: FlashAttention in place is the attention of float64, and a recorded call reads lengths from the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.varlen_attention import PlacedSequences
from millstream_runtime.models.layers.attention import AttentionSpec
from tests.support.varlen_reference import reference_attention

pytestmark = pytest.mark.gpu
POOL_TOKENS = 4096
CASES = {  # new tokens, tokens in the cache and the first slot of each sequence
    "decodes": [(1, 33, 1024), (1, 700, 0), (1, 1, 4000), (1, 512, 2048)],
    "one long decode": [(1, 2000, 1600)],
    "whole prompts": [(20, 20, 512), (333, 333, 1024)],
    "later chunks": [(20, 70, 512), (2, 900, 1024), (64, 64, 0)],
}


def placed_of(sequences: list[tuple[int, int, int]]) -> PlacedSequences:
    counts, lengths, slots = (list(part) for part in zip(*sequences, strict=True))
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    query_starts, first_slots, lengths_ = (
        torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in (starts, [*slots, 0], lengths)
    )
    return PlacedSequences(query_starts, first_slots, lengths_, max(counts), max(lengths))


def expected(pool: Tensor, query: Tensor, placed: PlacedSequences, scale: float) -> Tensor:
    keys, values = (half.transpose(0, 1).double().cpu() for half in pool.chunk(2))
    on_host = PlacedSequences(
        placed.query_starts.cpu(), placed.first_slots.cpu(), placed.lengths.cpu(), placed.max_queries, placed.max_length
    )
    return reference_attention(query.double().cpu(), keys, values, on_host, scale)


def error(attended: Tensor, reference: Tensor) -> float:
    return float((attended.double().cpu() - reference).norm() / reference.norm())


@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 8, 128), (8, 8, 64), (14, 2, 64), (8, 4, 256)])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_attention_of_float64(name: str, shape: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = shape
    placed, generator = placed_of(CASES[name]), torch.Generator("cuda").manual_seed(4)
    size = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    pool = torch.randn(2 * num_kv_heads, POOL_TOKENS, head_dim, **size)  # type: ignore[call-overload]
    query = torch.randn(int(placed.query_starts[-1]), num_heads, head_dim, **size)  # type: ignore[call-overload]
    assert varlen_attention.can_read(pool)
    spec = AttentionSpec(head_dim**-0.5)
    reference = expected(pool, query, placed, spec.scale)
    assert error(varlen_attention.attend(pool, query, placed, spec), reference) < 1e-2
    outside = torch.ones(POOL_TOKENS, dtype=torch.bool, device="cuda")
    for _, length, first_slot in CASES[name]:
        outside[first_slot : first_slot + length] = False
    pool[:, outside] = float("nan")  # whoever these tokens belong to
    assert error(varlen_attention.attend(pool, query, placed, spec), reference) < 1e-2


def test_a_recorded_call_reads_lengths_and_places_from_the_device() -> None:
    placed, generator = placed_of(CASES["decodes"]), torch.Generator("cuda").manual_seed(5)
    size = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    pool = torch.randn(16, POOL_TOKENS, 128, **size)  # type: ignore[call-overload]
    query = torch.randn(4, 16, 128, **size)  # type: ignore[call-overload]
    spec = AttentionSpec(128**-0.5)
    varlen_attention.attend(pool, query, placed, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = varlen_attention.attend(pool, query, placed, spec)
    placed.lengths.copy_(torch.tensor([1, 64, 90, 700]))
    placed.first_slots.copy_(torch.tensor([4095, 0, 16, 3000, 0]))
    graph.replay()
    assert error(attended, expected(pool, query, placed, spec.scale)) < 1e-2
