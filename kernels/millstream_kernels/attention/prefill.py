"""Causal attention of prompts' chunks over the paged pool: whole prompts, later chunks, and what a cached prefix left.

Mathematics: as in `decode`. A chunk may be of any length; each request has its own (varlen), none is padded to another.

    tokens of the cache            one program per (request, KV head, tile of rows); rows are queries x group
    0          lowest  highest
    | . . . . . . . | d d |  ->    .: every row of the tile sees all of them                   nothing to mask
                                   d: some rows come before these tokens (the diagonal)        masked

With a window there is one range, masked, from the first token that the lowest row sees; with codes, from token 0.

Tiles of tokens begin at multiples of their size, so that a row's sums have one order however a prompt is cut into
chunks, and whoever is in the batch. The last tiles of a chunk read most and start first.

Keys and values may be numbers of the query's type, or codes of 8 bits with scales: see `tile`.

Bytes:  2 * KV * D * L numbers of 2 or 4 bytes, of codes 1 byte, int8 with 4 * KV * L of scales, per request and tile of
        rows, mostly from the L2 cache; H * D in and out per row.
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
    STRIDE_UNIT,
    PagedRequests,
    Scores,
    Shape,
    check,
    pool_types,
    production,
    variant_name,
)
from millstream_kernels.attention.tile import (
    FACTORS,
    attend_tile,
    numbers_of,
    scores_of,
    token_scales,
    token_slots,
    values_of,
)
from millstream_kernels.stored_as import StoredAs
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


def tiles(head_dim: int, capability: int, stored_as: StoredAs = StoredAs.NUMBERS) -> PrefillPlan:
    """What is compiled for a head size. Before sm_90 registers hold what `wgmma` reads from shared memory, and tiles of
    64 tokens would spill them; with codes, tiles of more rows."""
    block_dim = triton.next_power_of_2(head_dim)
    if stored_as is not StoredAs.NUMBERS and capability < 90:
        return PrefillPlan(block_dim, 64, 64, num_warps=8, num_stages=2)
    block_tokens = 64 if capability >= 90 or block_dim <= 64 else 32
    block_rows = 128 if block_dim <= 128 else 64
    return PrefillPlan(block_dim, block_rows, block_tokens, num_warps=8, num_stages=3)


def plan(shape: Shape, requests: PagedRequests, capability: int, stored_as: StoredAs = StoredAs.NUMBERS) -> PrefillPlan:
    """Return how a batch is cut. `capability`: 80 for sm_80."""
    own = tiles(shape.head_dim, capability, stored_as)
    return replace(own, row_tiles=triton.cdiv(requests.max_queries * shape.group, own.block_rows))


@triton.jit
def _attend_range(
    maximum,
    total,
    attended,
    q,
    keys,
    values,
    key_scales,
    value_scales,
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
    STORED_AS: tl.constexpr,
    FACTOR: tl.constexpr,
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
        slots = token_slots(table, tokens, is_token, PAGE)
        places = slots * pool_slot * UNIT
        k = tl.load(keys + places[None, :] + dims[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0)
        scale_of_scores = scale
        if STORED_AS == 1:
            scale_of_scores = scale * token_scales(key_scales, slots, is_token)[None, :]
        scores = scores_of(q, numbers_of(k, q.dtype, STORED_AS), scale_of_scores, softcap, HAS_SOFTCAP)
        if MASKED:
            seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen &= tokens[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        v = tl.load(values + places[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0)
        v = values_of(v, q.dtype, STORED_AS)
        if STORED_AS == 1:
            of_values = token_scales(value_scales, slots, is_token) * FACTOR
            maximum, total, attended = attend_tile(maximum, total, attended, scores, v, of_values)
        else:
            maximum, total, attended = attend_tile(maximum, total, attended, scores, v)
    return maximum, total, attended


@triton.jit(
    do_not_specialize=[
        "query_row",
        "query_head",
        "pool_head",
        "pool_slot",
        "scale_head",
        "table_row",
        "num_kv_heads",
        "group",
        "window",
    ]
)
def paged_prefill(
    query,
    pool,
    kv_scales,
    tables,
    lengths,
    query_starts,
    output,
    query_row,
    query_head,
    pool_head,
    pool_slot,
    scale_head,
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
    STORED_AS: tl.constexpr,
    FACTOR: tl.constexpr,
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
    # Whole tiles only: a tile begins at the same token for everyone. Up to `open_end` every row sees all tokens. Codes
    # have one range, as windows have: a second loop would spill registers.
    HAS_OPEN_RANGE: tl.constexpr = not HAS_WINDOW and STORED_AS == 0
    first_seen = 0
    begin = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(lowest - window + 1, 0)
        begin = first_seen // BLOCK_TOKENS * BLOCK_TOKENS
    open_end = begin
    if HAS_OPEN_RANGE:
        open_end = tl.minimum(tl.maximum(lowest + 1, 0), end) // BLOCK_TOKENS * BLOCK_TOKENS

    places_of_query = rows[:, None] * query_row + heads[:, None] * query_head + dims[None, :]
    q = tl.load(query + places_of_query, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    keys = pool + (kv_head * UNIT).to(tl.int64) * pool_head
    values = pool + ((kv_head + num_kv_heads) * UNIT).to(tl.int64) * pool_head
    table = tables + request.to(tl.int64) * table_row
    key_scales = kv_scales + kv_head.to(tl.int64) * scale_head
    value_scales = kv_scales + (kv_head + num_kv_heads).to(tl.int64) * scale_head
    if STORED_AS == 2:
        scale *= tl.load(key_scales) * FACTOR

    maximum = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    attended = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    if HAS_OPEN_RANGE:
        maximum, total, attended = _attend_range(
            maximum, total, attended, q, keys, values, key_scales, value_scales, table, positions,
            begin, open_end, length, first_seen, pool_slot, window, scale, softcap,
            HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, PAGE, UNIT, HAS_WINDOW, HAS_SOFTCAP, STORED_AS, FACTOR, False,
        )  # fmt: skip
    maximum, total, attended = _attend_range(
        maximum, total, attended, q, keys, values, key_scales, value_scales, table, positions,
        open_end, end, length, first_seen, pool_slot, window, scale, softcap,
        HEAD_DIM, BLOCK_DIM, BLOCK_TOKENS, PAGE, UNIT, HAS_WINDOW, HAS_SOFTCAP, STORED_AS, FACTOR, True,
    )  # fmt: skip

    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    if STORED_AS == 1:
        attended = attended * (1.0 / FACTOR)
    if STORED_AS == 2:
        attended = attended * (tl.load(value_scales) * FACTOR)
    places_of_result = (rows[:, None] * num_kv_heads * group + heads[:, None]) * HEAD_DIM + dims[None, :]
    is_result = is_row[:, None] & is_dim[None, :]
    tl.store(output + places_of_result, attended.to(output.dtype.element_ty), mask=is_result)


def paged_prefill_attention(
    query: Tensor,
    pool: Tensor,
    requests: PagedRequests,
    scores: Scores,
    *,
    kv_scales: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Attend with any number of query rows per request.

    Args:
        query: `[T, H, D]` in bfloat16, float16 or float32, dense in D. Rows outside all requests are not written.
        pool: `[2 * KV, slots, D]`, keys, then values, in the query's dtype; or codes: int8, or uint8, the bits of
            float8_e4m3fn. Strides are multiples of 16 numbers.
        kv_scales: of codes. int8: float16 `[2 * KV, slots]`, dense in slots; e4m3: float32 `[2 * KV]`.
        output: `[T, H, D]`, contiguous, in the query's dtype; allocated by default.

    Returns: `output`. A request of length 0 gets zeros.

    Raises:
        KernelArgumentError: naming the argument.
    """
    shape = check(query, pool, requests, scores, kv_scales)
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    require(output.is_contiguous() and output.shape == query.shape, "output", "is not contiguous in the query's shape")
    stored_as = StoredAs.of(pool.dtype)
    own = plan(shape, requests, capability_of(query), stored_as)
    count = requests.lengths.shape[0]
    if count == 0 or shape.num_rows == 0:
        return output
    scale, softcap = scores.in_base_2()
    paged_prefill[(own.row_tiles, count, shape.num_kv_heads)](
        query,
        pool,
        pool if kv_scales is None else kv_scales,
        requests.tables,
        requests.lengths,
        requests.query_starts,
        output,
        query.stride(0),
        query.stride(1),
        pool.stride(0) // STRIDE_UNIT,
        pool.stride(1) // STRIDE_UNIT,
        0 if kv_scales is None else kv_scales.stride(0),
        requests.tables.stride(0),
        shape.num_kv_heads,
        shape.group,
        scores.window if scores.window is not None else NO_WINDOW,
        scale,
        softcap,
        **_constants(own, shape.head_dim, requests.block_size_tokens, scores, stored_as),
        num_warps=own.num_warps,
        num_stages=own.num_stages,
    )
    return output


def _constants(
    own: PrefillPlan, head_dim: int, page: int, scores: Scores, stored_as: StoredAs
) -> dict[str, int | float | bool]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": own.block_dim,
        "BLOCK_ROWS": own.block_rows,
        "BLOCK_TOKENS": own.block_tokens,
        "PAGE": page,
        "UNIT": STRIDE_UNIT,
        "HAS_WINDOW": scores.window is not None,
        "HAS_SOFTCAP": scores.softcap is not None,
        "STORED_AS": int(stored_as),
        "FACTOR": FACTORS[stored_as],
    }


def prefill_variants() -> Iterator[Variant]:
    """Those of models in 16 bits with blocks of 16 tokens."""
    for capability, (dtype, head_dim, scores, stored_as) in product((80, 90), production()):
        own = tiles(head_dim, capability, stored_as)
        pointers = {"query": f"*{dtype}"} | pool_types(dtype, stored_as) | INDICES | {"output": f"*{dtype}"}
        numbers = dict.fromkeys(paged_prefill.arg_names[7:16], "i32") | {"scale": "fp32", "softcap": "fp32"}
        yield Variant(
            variant_name(dtype, head_dim, scores, stored_as),
            paged_prefill,
            pointers | numbers,
            _constants(own, head_dim, 16, scores, stored_as),
            TensorCores.WGMMA,
            own.num_warps,
            own.num_stages,
            capabilities=(capability,),
        )
