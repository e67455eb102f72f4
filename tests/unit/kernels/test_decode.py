"""Paged decode attention: its numbers, its traps, and one result for one row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.attention.decode import ROWS, SPLIT_TOKENS, paged_decode_attention, plan
from millstream_kernels.attention.specification import Shape
from millstream_kernels.stored_as import StoredAs
from tests.support.kernel_launches import recording_launches
from tests.support.paged_cases import Filled, Paged, assert_as_good_as_torch, make, spread
from tests.support.triton_interpreter import interpreting

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP32 = torch.bfloat16, torch.float32

SWEEP = [
    Paged((48,), (1,), 6, 1, 192),
    Paged((1, 16, 17, 100), (1, 1, 1, 1)),
    Paged((200,), (1,), 8, 1, 128, BF16),  # MQA
    Paged((64, 65), (1, 1), 4, 4, 96, BF16),  # no group
    Paged((70, 33), (1, 1), 5, 1, 80, BF16),
    Paged((90,), (1,), 14, 2, 64, BF16),  # groups of 7
    Paged((40,), (1,), 24, 2, 256, BF16),  # groups of 12
    Paged((129, 3), (1, 2), 4, 2, 64, FP32),
    Paged((150, 17), (5, 17), 4, 2, 64, BF16),  # drafts
    Paged((200, 20), (3, 1), 4, 2, 64, BF16, window=1),
    Paged((140, 30), (1, 4), 4, 2, 64, BF16, window=33),
    Paged((140, 30), (1, 4), 4, 2, 128, window=128),
    Paged((100, 5), (1, 2), 4, 2, 64, BF16, softcap=50.0),
    Paged((100,), (2,), 4, 2, 64, FP32, window=40, softcap=2.0),
]


def decode(filled: Filled, split_tokens: int = 64) -> Tensor:
    """Into an output that is NaN beforehand."""
    output = torch.full_like(filled.query.contiguous(), torch.nan)
    return paged_decode_attention(
        filled.query,
        filled.pool,
        filled.requests,
        filled.case.scores,
        kv_scales=filled.kv_scales,
        output=output,
        split_tokens=split_tokens,
    )


@pytest.mark.matrix("case")
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_it_is_as_good_as_torch(case: Paged) -> None:
    filled = make(case, strided=True)
    assert_as_good_as_torch(decode(filled), filled)


@pytest.mark.matrix
@pytest.mark.parametrize("stored_as", StoredAs)
def test_a_row_has_one_result_alone_in_company_and_as_a_draft(stored_as: StoredAs) -> None:
    lengths, counts = (150, 40), (5, 1)
    together = make(Paged(lengths, counts, 4, 2, 64, BF16, stored_as=stored_as))
    results = decode(together)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for place in range(count):
            own_length = length - count + 1 + place
            row = together.rows(request).start + place
            requests = replace(
                together.requests,
                tables=together.requests.tables[request : request + 1].clone(),
                lengths=torch.tensor([own_length], dtype=torch.int32),
                query_starts=torch.tensor([0, 1], dtype=torch.int32),
                max_queries=1,
                max_length=own_length,
            )
            alone = replace(together, query=together.query[row : row + 1].clone(), requests=requests)
            assert torch.equal(decode(alone)[0], results[row]), f"request {request}, row {place}"


def test_a_window_that_ends_inside_a_split_changes_no_bit_with_the_company() -> None:
    case = Paged((200, 90), (4, 1), 4, 2, 64, FP32, window=100)
    together = make(case)
    results = decode(together)
    for place in range(4):
        requests = replace(
            together.requests,
            tables=together.requests.tables[:1],
            lengths=torch.tensor([197 + place], dtype=torch.int32),
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            max_queries=1,
        )
        alone = replace(together, query=together.query[place : place + 1].clone(), requests=requests)
        assert torch.equal(decode(alone)[0], results[place])


@pytest.mark.parametrize("border", [63, 64, 65])
def test_a_split_that_ends_before_the_window_is_not_combined(border: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored of it, so what its memory held before would count. `border`: the first token of the window."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(3))
    filled = make(Paged((border + 70,), (1,), 2, 1, 64, FP32, window=70))
    assert_as_good_as_torch(decode(filled), filled)


def test_more_splits_than_are_combined_at_once() -> None:
    filled = make(Paged((1100, 1030), (1, 2), 2, 1, 64, FP32))
    assert_as_good_as_torch(decode(filled), filled)


def test_a_padded_request_of_length_0_gets_zeros() -> None:
    filled = make(Paged((0, 20, 0), (1, 1, 1), 2, 1, 64, BF16))
    result = decode(filled)
    assert_as_good_as_torch(result, filled)
    assert not result[0].any()


@pytest.mark.parametrize(
    ("length", "masked"), [(130, 64), (1100, 1024)], ids=["a split", "all that are combined at once"]
)
def test_scores_that_are_minus_infinity_weigh_nothing(length: int, masked: int) -> None:
    filled = make(Paged((length,), (1,), 2, 1, 64, FP32))
    filled.query.abs_()
    first = filled.requests.tables[0, : masked // 16].long()
    slots = (first[:, None] * 16 + torch.arange(16)).flatten()
    filled.pool[0, slots] = -torch.inf
    result = decode(filled)
    assert result.isfinite().all()
    values = filled.values[0][masked:, 0]
    keys = filled.keys[0][masked:, 0]
    weights = (filled.query[0] @ keys.T * filled.case.scores.scale).softmax(-1)
    torch.testing.assert_close(result[0], weights @ values, rtol=1e-5, atol=1e-6)


def test_a_request_with_nan_leaves_its_neighbours_alone() -> None:
    filled = make(Paged((40, 50), (1, 1), 4, 2, 64, BF16))
    expected = decode(filled)
    filled.query[0] = torch.nan
    result = decode(filled)
    assert result[0].isnan().all()
    assert torch.equal(result[1], expected[1])


@pytest.mark.parametrize("apart", ["heads", "slots"])
def test_indices_beyond_two_to_the_31_are_computed_in_64_bits(tmp_path: Path, apart: str) -> None:
    """Heads, or slots, so far apart that a distance, in numbers, is no int32. `checking_overflow` makes an error of
    int32 arithmetic that overflows."""
    filled = make(Paged((20,), (1,), 2, 2, 64, torch.float16))
    with interpreting(checking_overflow=True):
        result = decode(replace(filled, pool=spread(filled.pool, apart, tmp_path / "pool")))
    assert_as_good_as_torch(result, filled)


def test_a_table_wider_than_any_request_is_not_read_beyond_it() -> None:
    filled = make(Paged((20, 33), (1, 1)), width_blocks=64)
    for request, length in enumerate((20, 33)):
        filled.requests.tables[request, -(-length // 16) :] = 1 << 30
    assert_as_good_as_torch(decode(filled), filled)


def test_no_requests_are_no_work() -> None:
    filled = make(Paged((), ()))
    assert decode(filled).shape == (0, 4, 64)


def test_tiles_and_splits_follow_from_the_model_alone() -> None:
    few, many = make(Paged((20,), (1,))).requests, make(Paged((600, 20), (17, 1))).requests
    small, large = (plan(Shape(n, 4, 2, 64), requests) for n, requests in ((1, few), (18, many)))
    assert (small.block_tokens, small.split_tokens) == (large.block_tokens, large.split_tokens)
    assert (small.num_splits, large.num_splits) == (1, 2)
    assert (small.row_tiles, large.row_tiles) == (1, -(-17 * 2 // ROWS))


@pytest.mark.matrix("queries")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 5])
def test_what_production_starts_is_in_the_table_of_variants(dtype: torch.dtype, queries: int) -> None:
    for case in (
        Paged((20,), (queries,), 8, 1, 128, dtype),
        Paged((20,), (queries,), 7, 7, 64, dtype),
        Paged((20,), (queries,), 4, 2, 256, BF16, window=9, softcap=3.0),
        Paged((20,), (queries,), 8, 1, 128, dtype, stored_as=StoredAs.INT8),
        Paged((20,), (queries,), 4, 2, 256, BF16, window=9, softcap=3.0, stored_as=StoredAs.E4M3),
    ):
        with recording_launches(executing=False) as launches:
            decode(make(case), SPLIT_TOKENS)
        assert [launch.kernel for launch in launches] == ["paged_decode", "combine_splits"]
        for launch in launches:
            assert launch.variant_names(), f"{case}: {launch} is compiled in service"


BAD: dict[str, dict[str, Any]] = {
    "query": {"query": torch.zeros(1, 4, 64, dtype=torch.float64)},
    "pool": {"pool": torch.zeros(4, 64, 64, dtype=torch.float32)},
    "pool has strides": {"pool": torch.zeros(4, 64, 65, dtype=torch.float16)[..., :64]},
    "pool has 3 heads": {"pool": torch.zeros(3, 64, 64, dtype=torch.float16)},
    "query has 4 query heads over 3": {"pool": torch.zeros(6, 64, 64, dtype=torch.float16)},
    "query does not begin": {"query": torch.zeros(4 * 64 + 1, dtype=torch.float16)[1:].view(1, 4, 64)},
    "query has a stride": {"query": torch.zeros(1, 4, 128, dtype=torch.float16)[..., ::2]},
}


@pytest.mark.parametrize("problem", BAD)
def test_an_argument_that_it_does_not_take_is_named(problem: str) -> None:
    filled = replace(make(Paged((20,), (1,))), **BAD[problem])
    with pytest.raises(KernelArgumentError, match=f"^{problem}"):
        decode(filled)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"max_queries": 18}, "max_queries is 18"),
        ({"max_length": 4000}, "max_length is 4000; tables hold 64"),
        ({"query_starts": torch.zeros(3, dtype=torch.int32)}, "query_starts has the shape"),
        ({"lengths": torch.zeros(1)}, "lengths is torch.float32"),
        ({"block_size_tokens": 24}, "block_size_tokens is 24"),
    ],
)
def test_a_batch_that_it_does_not_take_is_named(change: dict[str, Any], problem: str) -> None:
    filled = make(Paged((20,), (1,)))
    filled = replace(filled, requests=replace(filled.requests, **change))
    with pytest.raises(KernelArgumentError, match=problem):
        decode(filled)


@pytest.mark.parametrize("head_dim", [8, 72, 272])
def test_a_head_size_that_it_does_not_take_is_named(head_dim: int) -> None:
    with pytest.raises(KernelArgumentError, match=f"head size {head_dim}"):
        decode(make(Paged((20,), (1,), head_dim=head_dim)))
