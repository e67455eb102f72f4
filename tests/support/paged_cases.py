"""Requests over a paged pool in which everything that attention may not read is NaN, and what it has to compute.

A code of int8 is never NaN: there its scale is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_kernels.attention.specification import PagedRequests, Scores
from millstream_kernels.stored_as import StoredAs

BLOCK = 16
NO_CODE = {StoredAs.INT8: -128, StoredAs.E4M3: 0x7F}  # what no number becomes


@dataclass(frozen=True)
class Paged:
    """Lengths and new tokens of some requests, and a model's attention. `make` fills a pool for it."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    window: int | None = None
    softcap: float | None = None
    seed: int = 0
    stored_as: StoredAs = StoredAs.NUMBERS

    @property
    def scores(self) -> Scores:
        return Scores(self.head_dim**-0.5, self.window, self.softcap)

    @property
    def name(self) -> str:
        """What the masks and scores ask of a kernel: the row of a case in a matrix."""
        return (
            " and ".join(["window"] * (self.window is not None) + ["softcap"] * (self.softcap is not None)) or "plain"
        )

    def alone(self, request: int) -> Paged:
        return replace(self, lengths=(self.lengths[request],), queries=(self.queries[request],))

    def __str__(self) -> str:
        parts = [f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}", str(self.dtype).removeprefix("torch.")]
        parts += [f"window{self.window}"] if self.window else []
        parts += [f"cap{self.softcap:g}"] if self.softcap else []
        parts += [self.stored_as.name.lower()] if self.stored_as else []
        return "-".join([*parts, "_".join(map(str, self.lengths)), "q", "_".join(map(str, self.queries))])


@dataclass(frozen=True)
class Filled:
    """`keys[r]`, `values[r]`: `[length, KV, D]`, what request `r` has in the pool; NaN before its windows. Of codes,
    times their scales, in float64."""

    case: Paged
    query: Tensor
    pool: Tensor
    requests: PagedRequests
    keys: list[Tensor]
    values: list[Tensor]
    kv_scales: Tensor | None = None

    def rows(self, request: int) -> slice:
        first = sum(self.case.queries[:request])
        return slice(first, first + self.case.queries[request])


def make(case: Paged, *, strided: bool = False, width_blocks: int = 0) -> Filled:
    """`strided`: query and pool are views whose neighbours are NaN. `width_blocks`: of the tables, at least."""
    random = torch.Generator().manual_seed(case.seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype)

    counts = [-(-length // BLOCK) for length in case.lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks - 1, generator=random) + 1  # block 0 holds nothing but NaN
    slots = num_blocks * BLOCK
    extra = 32 if strided else 0
    pool, kv_scales = empty_pool(
        case.stored_as, (2 * case.num_kv_heads, slots, case.head_dim), case.dtype, extra=extra, extra_slots=extra
    )
    num_rows = sum(case.queries)
    query = torch.full((num_rows, case.num_heads + (2 if strided else 0), case.head_dim), torch.nan, dtype=case.dtype)
    query = query[:, : case.num_heads]
    query.copy_(numbers(num_rows, case.num_heads, case.head_dim))
    tables = torch.zeros(len(counts), max([width_blocks, *(count + 2 for count in counts)]), dtype=torch.int32)
    keys, values, used = [], [], 0
    for request, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        table = order[used : used + count]
        used += count
        tokens = numbers(2 * case.num_kv_heads, length, case.head_dim)
        unseen = 0 if case.window is None else max(0, length - case.queries[request] - case.window + 1)
        tokens[:, :unseen] = torch.nan
        positions = torch.arange(length)
        tokens = store(tokens, pool, kv_scales, table[positions // BLOCK] * BLOCK + positions % BLOCK)
        table[: unseen // BLOCK] = 0  # these blocks may be another request's by now
        tables[request, :count] = table
        keys.append(tokens[: case.num_kv_heads].transpose(0, 1))
        values.append(tokens[case.num_kv_heads :].transpose(0, 1))
    starts = torch.tensor([0, *case.queries]).cumsum(0).to(torch.int32)
    requests = PagedRequests(
        tables,
        torch.tensor(case.lengths, dtype=torch.int32),
        starts,
        max(case.queries, default=1),
        max(case.lengths, default=0),
        BLOCK,
    )
    return Filled(case, query, pool, requests, keys, values, kv_scales)


def empty_pool(
    stored_as: StoredAs, shape: tuple[int, int, int], dtype: torch.dtype, *, extra: int = 0, extra_slots: int = 0
) -> tuple[Tensor, Tensor | None]:
    """A pool `[heads, slots, D]` of nothing but NaN, a view of one with some numbers and slots more; and scales."""
    heads, slots, size = shape
    types = {StoredAs.INT8: torch.int8, StoredAs.E4M3: torch.uint8}
    pool = torch.full(
        (heads, slots + extra_slots, size + extra),
        NO_CODE.get(stored_as, torch.nan),
        dtype=types.get(stored_as, dtype),
    )
    kv_scales = {
        StoredAs.INT8: torch.full((heads, slots + extra_slots), torch.nan, dtype=torch.float16)[:, :slots],
        StoredAs.E4M3: torch.linspace(0.01, 0.03, heads),
    }.get(stored_as)
    return pool[:, :slots, :size], kv_scales


def store(tokens: Tensor, pool: Tensor, kv_scales: Tensor | None, slots: Tensor) -> Tensor:
    """`tokens` `[heads, T, D]` into `slots` of a pool; returns what it holds of them."""
    if kv_scales is None:
        pool[:, slots] = tokens
        return tokens
    if pool.dtype == torch.uint8:
        scales = kv_scales.double()[:, None, None]
        codes = (tokens.double() / scales).to(torch.float8_e4m3fn)
        pool[:, slots] = codes.view(torch.uint8)
        return codes.double() * scales
    kv_scales[:, slots] = (tokens.abs().amax(-1).float() / 127).half()
    scales = kv_scales[:, slots].double()[..., None]
    pool[:, slots] = (tokens.double() / scales).round().nan_to_num(-128).to(torch.int8)
    return pool[:, slots].double() * scales


def spread(pool: Tensor, apart: str, file: Path) -> Tensor:
    """The same numbers with `heads` or `slots` so far apart that the place of most is no int32, in a file with holes:
    what nothing touches takes no room."""
    heads, slots, size = pool.shape
    if apart == "heads":
        strides = ((1 << 31) + size, size, 1)
    else:
        distance = (1 << 31) // (slots // 8) // size * size
        strides = (size, distance, 1)
        assert heads * size <= distance
    numbers = 1 + sum((count - 1) * stride for count, stride in zip(pool.shape, strides, strict=True))
    memory = torch.from_file(str(file), shared=True, size=numbers, dtype=pool.dtype)
    return memory.as_strided(tuple(pool.shape), strides).copy_(pool)


def attention(filled: Filled, dtype: torch.dtype) -> Tensor:
    """`[T, H, D]` in `dtype`: float64 is the truth, the case's dtype what torch makes of it."""
    case, outputs = filled.case, []
    for request, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        if length == 0:
            outputs.append(torch.zeros(count, case.num_heads, case.head_dim, dtype=dtype))
            continue
        query = filled.query[filled.rows(request)].to(dtype).transpose(0, 1)
        group = case.num_heads // case.num_kv_heads
        # Where all is NaN nothing is seen; a mask alone would leave 0 * NaN.
        keys, values = (
            one[request].nan_to_num(0).to(dtype).transpose(0, 1).repeat_interleave(group, 0)
            for one in (filled.keys, filled.values)
        )
        positions = torch.arange(length - count, length)[:, None]
        tokens = torch.arange(length)[None, :]
        hidden = tokens > positions
        if case.window is not None:
            hidden |= tokens <= positions - case.window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        outputs.append(_attend(query, keys, values, mask, case.scores).transpose(0, 1))
    return torch.cat(outputs)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    if scores.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scores.scale)
    made = (query @ keys.mT * scores.scale / scores.softcap).tanh() * scores.softcap + mask
    wide = torch.promote_types(query.dtype, torch.float32)
    return made.softmax(-1, dtype=wide).to(query.dtype) @ values


def assert_as_good_as_torch(result: Tensor, filled: Filled) -> None:
    """The error is at most twice that of torch in the same dtype, or half a rounding of the largest number."""
    truth = attention(filled, torch.float64)
    torch_error = (attention(filled, filled.case.dtype).double() - truth).abs().max()
    rounding = torch.finfo(filled.case.dtype).eps / 2 * truth.abs().max() * (1 + 1e-6)
    assert result.isfinite().all(), f"{(~result.isfinite()).any(-1).nonzero().tolist()[:4]} are not finite"
    error = (result.double() - truth).abs().max()
    assert error <= max(2 * torch_error.item(), rounding.item()), f"error {error:.3g}, torch's {torch_error:.3g}"
