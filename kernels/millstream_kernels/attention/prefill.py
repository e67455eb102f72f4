"""Causal attention of prompts' chunks over the paged pool: whole prompts, later chunks, and what a cached prefix left.

Mathematics: as in `decode`. A chunk may be of any length; each request has its own (varlen), none is padded to another.

    tokens of the cache            one program per (request, KV head, tile of rows); rows are queries x group
    0          lowest  highest
    | . . . . . . . | d d |  ->    .: every row of the tile sees all of them                   nothing to mask
                                   d: some rows come before these tokens (the diagonal)        masked

With a window there is one range, masked, from the first token that the lowest row sees.

Tiles of tokens begin at multiples of their size, so that a row's sums have one order however a prompt is cut into
chunks, and whoever is in the batch. The last tiles of a chunk read most and start first.

Bytes:  2 * KV * D * L per request and tile of rows, mostly from the L2 cache; H * D in and out per row.
FLOPs:  4 * H * D * sum over rows of (p + 1), half of 4 * H * D * n * L for a whole prompt.  Compute-bound.

Dao 2023 (arXiv 2307.08691); the pool's tables as in Kwon et al. 2023 (arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import capability_of, require
from millstream_kernels.attention.specification import (
    INDICES,
    NO_WINDOW,
    PRODUCTION,
    STRIDE_UNIT,
    PagedRequests,
    Scores,
    Shape,
    check,
    variant_name,
)
from millstream_kernels.attention.tile import attend_tile, scores_of, token_slots
from millstream_kernels.variant import TensorCores, Variant


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Sizes of tiles and of the grid. All but the last follow from the model alone, never from the batch."""

    block_dim: int
    block_rows: int  # 64 or more: `wgmma` where there is one
    block_tokens: int
    num_warps: int
    num_stages: int
    row_tiles: int = 1


def tiles(head_dim: int, capability: int) -> PrefillPlan:
    """What is compiled for a head size. Before sm_90 registers hold what `wgmma` reads from shared memory, and tiles of
    64 tokens would spill them."""
    block_dim = triton.next_power_of_2(head_dim)
    block_tokens = 64 if capability >= 90 or block_dim <= 64 else 32
    block_rows = 128 if block_dim <= 128 else 64
    return PrefillPlan(block_dim, block_rows, block_tokens, num_warps=8, num_stages=3)


def plan(shape: Shape, requests: PagedRequests, capability: int) -> PrefillPlan:
    """Return how a batch is cut. `capability`: 80 for sm_80."""
    own = tiles(shape.head_dim, capability)
    return replace(own, row_tiles=triton.cdiv(requests.max_queries * shape.group, own.block_rows))


@triton.jit
def _attend_range(
    maximum,
    total,
    attended,
    q,
    keys,
    values,
    table,
    positions,
    begin,
    end,
    length,
    first_seen,
    pool_slot,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tiles of tokens from `begin` up to `end`, both multiples of the tile but for an `end` at the last token."""
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    for start in range(begin, end, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        is_token = tokens < length
        if HAS_WINDOW:
            is_token &= tokens >= first_seen
        places = token_slots(table, tokens, is_token, PAGE) * pool_slot * UNIT
        k = tl.load(keys + places[None, :] + dims[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0)
        scores = scores_of(q, k, scale, softcap, HAS_SOFTCAP)
        if MASKED:
            seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen &= tokens[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        v = tl.load(values + places[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0)
        maximum, total, attended = attend_tile(maximum, total, attended, scores, v)
    return maximum, total, attended


@triton.jit(
    do_not_specialize=[
        "query_row",
        "query_head",
        "pool_head",
        "pool_slot",
        "table_row",
        "num_kv_heads",
        "group",
        "window",
    ]
)
def paged_prefill(
    query,
    pool,
    tables,
    lengths,
    query_starts,
    output,
    query_row,
    query_head,
    pool_head,
    pool_slot,
    table_row,
    num_kv_heads,
    group,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One tile of rows. `pool_head`, `pool_slot`: strides in units of `UNIT` numbers."""
    request = tl.program_id(1)
    kv_head = tl.program_id(2)
    first_of_tile = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_ROWS
    length = tl.load(lengths + request).to(tl.int32)
    first_row = tl.load(query_starts + request)
    num_queries = (tl.load(query_starts + request + 1) - first_row).to(tl.int32)
    num_rows = num_queries * group
    places = first_of_tile + tl.arange(0, BLOCK_ROWS)
    is_row = places < num_rows
    rows = first_row.to(tl.int64) + places // group
    heads = kv_head * group + places % group
    positions = length - num_queries + places // group
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM

    lowest = length - num_queries + first_of_tile // group
    highest = length - num_queries + (tl.minimum(first_of_tile + BLOCK_ROWS, num_rows) - 1) // group
    end = tl.where(first_of_tile < num_rows, tl.minimum(highest + 1, length), 0)
    # Whole tiles only: a tile begins at the same token for everyone. Up to `open_end` every row sees all tokens.
    first_seen = 0
    begin = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(lowest - window + 1, 0)
        begin = first_seen // BLOCK_TOKENS * BLOCK_TOKENS
        open_end = begin
    else:
        open_end = tl.minimum(tl.maximum(lowest + 1, 0), end) // BLOCK_TOKENS * BLOCK_TOKENS

    places_of_query = rows[:, None] * query_row + heads[:, None] * query_head + dims[None, :]
    q = tl.load(query + places_of_query, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    keys = pool + (kv_head * UNIT).to(tl.int64) * pool_head
    values = pool + ((kv_head + num_kv_heads) * UNIT).to(tl.int64) * pool_head
    table = tables + request.to(tl.int64) * table_row

    maximum = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    attended = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    if not HAS_WINDOW:
        maximum, total, attended = _attend_range(
            maximum, total, attended, q, keys, values, table, positions, begin, open_end, length, first_seen,
            pool_slot, window, scale, softcap,
            HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, PAGE, UNIT, HAS_WINDOW, HAS_SOFTCAP, False,
        )  # fmt: skip
    maximum, total, attended = _attend_range(
        maximum, total, attended, q, keys, values, table, positions, open_end, end, length, first_seen,
        pool_slot, window, scale, softcap,
        HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, PAGE, UNIT, HAS_WINDOW, HAS_SOFTCAP, True,
    )  # fmt: skip

    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    places_of_result = (rows[:, None] * num_kv_heads * group + heads[:, None]) * HEAD_DIM + dims[None, :]
    is_result = is_row[:, None] & is_dim[None, :]
    tl.store(output + places_of_result, attended.to(output.dtype.element_ty), mask=is_result)


def paged_prefill_attention(
    query: Tensor, pool: Tensor, requests: PagedRequests, scores: Scores, *, output: Tensor | None = None
) -> Tensor:
    """Attend with any number of query rows per request.

    Args:
        query: `[T, H, D]` in bfloat16, float16 or float32, dense in D. Rows outside all requests are not written.
        pool: `[2 * KV, slots, D]`, keys, then values; strides are multiples of 16 numbers.
        output: `[T, H, D]`, contiguous, in the query's dtype; allocated by default.

    Returns: `output`. A request of length 0 gets zeros.

    Raises:
        KernelArgumentError: naming the argument.
    """
    shape = check(query, pool, requests, scores)
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    require(output.is_contiguous() and output.shape == query.shape, "output", "is not contiguous in the query's shape")
    own = plan(shape, requests, capability_of(query))
    count = requests.lengths.shape[0]
    if count == 0 or shape.num_rows == 0:
        return output
    scale, softcap = scores.in_base_2()
    paged_prefill[(own.row_tiles, count, shape.num_kv_heads)](
        query,
        pool,
        requests.tables,
        requests.lengths,
        requests.query_starts,
        output,
        query.stride(0),
        query.stride(1),
        pool.stride(0) // STRIDE_UNIT,
        pool.stride(1) // STRIDE_UNIT,
        requests.tables.stride(0),
        shape.num_kv_heads,
        shape.group,
        scores.window if scores.window is not None else NO_WINDOW,
        scale,
        softcap,
        **_constants(own, shape.head_dim, requests.block_size_tokens, scores),
        num_warps=own.num_warps,
        num_stages=own.num_stages,
    )
    return output


def _constants(own: PrefillPlan, head_dim: int, page: int, scores: Scores) -> dict[str, int | bool]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": own.block_dim,
        "BLOCK_ROWS": own.block_rows,
        "BLOCK_TOKENS": own.block_tokens,
        "PAGE": page,
        "UNIT": STRIDE_UNIT,
        "HAS_WINDOW": scores.window is not None,
        "HAS_SOFTCAP": scores.softcap is not None,
    }


def prefill_variants() -> Iterator[Variant]:
    """Those of models in 16 bits with blocks of 16 tokens."""
    for capability, (dtype, head_dim, scores) in product((80, 90), PRODUCTION):
        own = tiles(head_dim, capability)
        pointers = {"query": f"*{dtype}", "pool": f"*{dtype}"} | INDICES | {"output": f"*{dtype}"}
        numbers = dict.fromkeys(paged_prefill.arg_names[6:14], "i32") | {"scale": "fp32", "softcap": "fp32"}
        yield Variant(
            variant_name(dtype, head_dim, scores),
            paged_prefill,
            pointers | numbers,
            _constants(own, head_dim, 16, scores),
            TensorCores.WGMMA,
            own.num_warps,
            own.num_stages,
            capabilities=(capability,),
        )
