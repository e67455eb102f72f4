"""Latent attention over the pool: its numbers, what it may not read, and one result for one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.attention.mla import mla_attention
from millstream_kernels.attention.specification import PagedRequests
from tests.support.kernel_launches import recording_launches

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAGE = 16


@dataclass(frozen=True)
class Filled:
    """`latents[r]`: `[length, C + R]`, what request `r` has in the pool, in which all else is NaN."""

    query: Tensor
    pool: Tensor
    requests: PagedRequests
    latents: list[Tensor]
    latent_dim: int

    @property
    def scale(self) -> float:
        return float(self.pool.shape[2] ** -0.5)

    def attend(self, split_tokens: int = 512) -> Tensor:
        """Into an output that is NaN beforehand."""
        output = torch.full((*self.query.shape[:2], self.latent_dim), torch.nan, dtype=self.query.dtype)
        return mla_attention(
            self.query, self.pool, self.latent_dim, self.requests, self.scale, output=output, split_tokens=split_tokens
        )

    def expected(self, dtype: torch.dtype) -> Tensor:
        """In `dtype`, request by request."""
        found = []
        rows = pairwise(self.requests.query_starts.tolist())
        for latent, (first, stop) in zip(self.latents, rows, strict=True):
            query, length = self.query[first:stop].to(dtype), len(latent)
            if length == 0:
                found.append(torch.zeros(stop - first, self.query.shape[1], self.latent_dim, dtype=dtype))
                continue
            scores = torch.einsum("qhd,kd->qhk", query, latent.to(dtype)) * self.scale
            positions = torch.arange(length - (stop - first), length)
            scores.masked_fill_((torch.arange(length) > positions[:, None])[:, None, :], -torch.inf)
            weights = scores.softmax(-1, dtype=torch.promote_types(dtype, FP32)).to(dtype)
            found.append(torch.einsum("qhk,kc->qhc", weights, latent[:, : self.latent_dim].to(dtype)))
        return torch.cat(found)


def make(
    lengths: tuple[int, ...],
    queries: tuple[int, ...],
    num_heads: int = 4,
    latent_dim: int = 32,
    rotary_dim: int = 16,
    dtype: torch.dtype = FP32,
) -> Filled:
    """The pool and the queries are views whose neighbours are NaN."""
    random, size = torch.Generator().manual_seed(sum(lengths)), latent_dim + rotary_dim
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=random) + 1  # block 0 holds nothing but NaN
    slots = (sum(counts) + 2) * PAGE
    pool = torch.full((1, slots, size + 16), torch.nan, dtype=dtype)[:, :, :size]
    tables = torch.zeros(len(lengths), max(counts, default=0) + 2, dtype=torch.int32)
    latents, used = [], 0
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table, used = order[used : used + count], used + count
        latent = torch.randn(length, size, generator=random).to(dtype)
        positions = torch.arange(length)
        pool[0, table[positions // PAGE] * PAGE + positions % PAGE] = latent
        tables[request, :count] = table
        latents.append(latent)
    query = torch.full((sum(queries), num_heads + 1, size), torch.nan, dtype=dtype)[:, :num_heads]
    query.copy_(torch.randn(sum(queries), num_heads, size, generator=random))
    requests = PagedRequests(
        tables,
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([0, *queries]).cumsum(0).to(torch.int32),
        max(queries, default=1),
        max(lengths, default=0),
        PAGE,
    )
    return Filled(query, pool, requests, latents, latent_dim)


SWEEP = [
    make((1, 33, 600, 0), (1, 1, 1, 1)),  # a tile's edge, two splits, nothing at all
    make((70, 18), (5, 1), 5, 48, 16, BF16),  # a check of drafts in company; rows in several tiles
    make((40,), (3,), 20, 80, 32, FP16),
    make((60, 33), (60, 20), 3, 32, 16, BF16),  # prompts: whole, and behind a prefix
    make((37,), (30,), 1, 16, 48),
]


@pytest.mark.parametrize("case", range(len(SWEEP)))
def test_it_is_as_good_as_torch(case: int) -> None:
    filled = SWEEP[case]
    result, truth = filled.attend(), filled.expected(torch.float64)
    of_torch = float((filled.expected(filled.query.dtype).double() - truth).abs().max())
    rounding = torch.finfo(filled.query.dtype).eps / 2 * float(truth.abs().max()) * (1 + 1e-6)
    assert result.isfinite().all()
    assert float((result.double() - truth).abs().max()) <= max(2 * of_torch, rounding)


def alone(filled: Filled, request: int, first: int, stop: int, length: int) -> Filled:
    """Rows `first` to `stop` of one request, the last of `length` tokens."""
    requests = replace(
        filled.requests,
        tables=filled.requests.tables[request : request + 1].clone(),
        lengths=torch.tensor([length], dtype=torch.int32),
        query_starts=torch.tensor([0, stop - first], dtype=torch.int32),
        max_queries=stop - first,
        max_length=length,
    )
    return replace(filled, query=filled.query[first:stop], requests=requests)


def test_a_row_has_one_result_alone_in_company_and_as_a_row_of_a_check() -> None:
    together = make((100, 70), (1, 5), 4, 32, 16, FP32)
    expected = together.attend(64)
    assert torch.equal(alone(together, 0, 0, 1, 100).attend(64), expected[:1])
    for row in range(5):
        one = alone(together, 1, 1 + row, 2 + row, 66 + row)
        assert torch.equal(one.attend(64), expected[1 + row : 2 + row])


def test_a_row_of_a_prompt_has_one_result_however_it_is_cut() -> None:
    whole = make((60,), (60,))
    expected = whole.attend()
    for first, stop in ((0, 30), (30, 60), (17, 49)):
        assert torch.equal(alone(whole, 0, first, stop, stop).attend(), expected[first:stop])


def test_no_requests_are_no_work() -> None:
    assert make((), ()).attend().shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("query", {"query": torch.zeros(1, 4, 48, dtype=torch.float64)}),
        ("query", {"query": torch.zeros(1, 4, 96)[:, :, ::2]}),
        ("pool", {"pool": torch.zeros(2, 64, 48)}),
        ("pool", {"pool": torch.zeros(1, 64, 48, dtype=BF16)}),
        ("latent_dim", {"latent_dim": 24}),
        ("latent_dim", {"latent_dim": 48}),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(argument: str, change: dict[str, Any]) -> None:
    filled = make((20,), (1,))
    arguments: dict[str, Any] = {"query": filled.query, "pool": filled.pool, "latent_dim": 32} | change
    with pytest.raises(KernelArgumentError) as caught:
        mla_attention(**arguments, requests=filled.requests, scale=1.0)
    assert caught.value.argument == argument


def test_production_starts_what_is_in_the_table() -> None:
    for queries, num_heads in ((1, 16), (1, 128), (40, 16)):
        filled = make((50,), (queries,), num_heads, 512, 64, BF16)
        with recording_launches(executing=False) as launches:
            filled.attend()
        assert launches
        for launch in launches:
            assert launch.variant_names(), f"{launch} is compiled in service"
