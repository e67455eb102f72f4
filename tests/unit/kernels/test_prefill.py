"""Paged prefill attention: its numbers, its masks, and one result for one row however a prompt is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.attention.prefill import paged_prefill_attention
from millstream_kernels.stored_as import StoredAs
from tests.support.kernel_launches import recording_launches
from tests.support.paged_cases import Filled, Paged, assert_as_good_as_torch, make, spread
from tests.support.triton_interpreter import interpreting

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP32 = torch.bfloat16, torch.float32

SWEEP = [
    Paged((48,), (30,), 6, 1, 192),
    Paged((1, 63, 64, 65), (1, 63, 64, 65)),  # whole prompts, around a tile
    Paged((130,), (130,), 8, 1, 128, BF16),  # MQA; more than two tiles of keys
    Paged((100, 33), (100, 20), 4, 4, 96, BF16),  # no group; a chunk behind others
    Paged((230, 40), (40, 1), 5, 1, 80, BF16),  # a cached prefix; a decode in company
    Paged((90,), (70,), 14, 2, 64, BF16),  # groups of 7: a query's heads in two tiles
    Paged((70,), (45,), 12, 1, 256, BF16),
    Paged((129, 3), (100, 2), 4, 2, 64, FP32),
    Paged((200, 20), (150, 20), 2, 1, 64, BF16, window=1),
    Paged((200, 30), (100, 30), 4, 2, 64, BF16, window=33),
    Paged((330,), (40,), 2, 2, 64, window=200),  # tiles that every row sees between the window's edge and the diagonal
    Paged((100, 5), (90, 5), 4, 2, 64, BF16, softcap=50.0),
    Paged((150,), (120,), 4, 2, 64, FP32, window=40, softcap=2.0),
]


def prefill(filled: Filled) -> Tensor:
    """Into an output that is NaN beforehand."""
    output = torch.full_like(filled.query.contiguous(), torch.nan)
    return paged_prefill_attention(
        filled.query, filled.pool, filled.requests, filled.case.scores, kv_scales=filled.kv_scales, output=output
    )


@pytest.mark.matrix("case")
@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_it_is_as_good_as_torch(case: Paged) -> None:
    filled = make(case, strided=True)
    assert_as_good_as_torch(prefill(filled), filled)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("window", "stored_as"),
    [(None, StoredAs.NUMBERS), (50, StoredAs.NUMBERS), (None, StoredAs.INT8), (50, StoredAs.E4M3)],
)
def test_a_row_has_one_result_however_its_prompt_is_cut(window: int | None, stored_as: StoredAs) -> None:
    whole = make(Paged((130, 20), (130, 20), 6, 2, 64, FP32, window=window, stored_as=stored_as))
    expected = prefill(whole)[:130]
    for cut in (1, 64, 100):
        parts = []
        for first, stop in ((0, cut), (cut, 130)):
            requests = replace(
                whole.requests,
                tables=whole.requests.tables[:1].clone(),
                lengths=torch.tensor([stop], dtype=torch.int32),
                query_starts=torch.tensor([0, stop - first], dtype=torch.int32),
                max_queries=stop - first,
            )
            parts.append(prefill(replace(whole, query=whole.query[first:stop].clone(), requests=requests)))
        assert torch.equal(torch.cat(parts), expected), f"cut at {cut}"


def test_a_padded_request_of_length_0_gets_zeros() -> None:
    filled = make(Paged((0, 20, 0), (1, 20, 1), 2, 1, 64, BF16))
    result = prefill(filled)
    assert_as_good_as_torch(result, filled)
    assert not result[0].any()


def test_scores_that_are_minus_infinity_weigh_nothing() -> None:
    filled = make(Paged((130,), (2,), 2, 1, 64, FP32))
    filled.query.abs_()
    first = filled.requests.tables[0, :4].long()  # the whole first tile
    filled.pool[0, (first[:, None] * 16 + torch.arange(16)).flatten()] = -torch.inf
    result = prefill(filled)
    weights = (filled.query[1] @ filled.keys[0][64:, 0].T * filled.case.scores.scale).softmax(-1)
    torch.testing.assert_close(result[1], weights @ filled.values[0][64:, 0], rtol=1e-5, atol=1e-6)


def test_a_request_with_nan_leaves_its_neighbours_alone() -> None:
    filled = make(Paged((40, 50), (40, 20), 4, 2, 64, BF16))
    expected = prefill(filled)
    filled.query[:40] = torch.nan
    result = prefill(filled)
    assert result[:40].isnan().all()
    assert torch.equal(result[40:], expected[40:])


@pytest.mark.parametrize("apart", ["heads", "slots"])
def test_indices_beyond_two_to_the_31_are_computed_in_64_bits(tmp_path: Path, apart: str) -> None:
    """See `test_decode`."""
    filled = make(Paged((20,), (20,), 2, 2, 64, torch.float16))
    with interpreting(checking_overflow=True):
        result = prefill(replace(filled, pool=spread(filled.pool, apart, tmp_path / "pool")))
    assert_as_good_as_torch(result, filled)


def test_what_production_starts_is_in_the_table_of_variants() -> None:
    for case in (
        Paged((20,), (20,), 8, 1, 128, BF16),
        Paged((20, 30), (3, 30), 7, 7, 64, torch.float16),
        Paged((20,), (20,), 4, 2, 256, BF16, window=9, softcap=3.0),
        Paged((20,), (20,), 8, 1, 128, BF16, stored_as=StoredAs.INT8),
        Paged((20,), (20,), 4, 2, 256, BF16, window=9, softcap=3.0, stored_as=StoredAs.E4M3),
    ):
        with recording_launches(executing=False) as launches:
            prefill(make(case))
        assert [launch.kernel for launch in launches] == ["paged_prefill"]
        assert launches[0].variant_names(), f"{case}: {launches[0]} is compiled in service"


def test_no_requests_are_no_work() -> None:
    assert prefill(make(Paged((), ()))).shape == (0, 4, 64)


def test_an_argument_that_it_does_not_take_is_named() -> None:
    filled = make(Paged((20,), (20,)))
    with pytest.raises(KernelArgumentError, match=r"^pool is float32"):
        prefill(replace(filled, pool=filled.pool.float()))
