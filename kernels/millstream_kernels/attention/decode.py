"""Attention of a few new tokens per request over all of its tokens in the paged pool (decodes, checks of drafts).

Mathematics: query row i of a request with n new tokens and length L is the token at p = L - n + i. It sees the tokens
j <= p, with a window w those with p - w < j <= p: out = softmax(scale * q k_j) v_j, see `tile`.

    request 0   tables  | 7 | 3 | 9 |        tokens in splits of a fixed length, one program per
                          0   16  32 .. L    (request, KV head and 16 rows, split); rows are n queries x group
                        | split 0 | split 1 |   -> maxima, sums, sums of values: float32 [rows, H, splits]
    then                one program per (row, head) combines them in base 2, in the order of the splits

Where a split begins depends on the token's position alone, and a tile has the same size in every batch: one row has
one result, alone, in company, or as a row of a draft's check. Splits by occupancy would be faster for a few requests
that are short of splits, and would break that.

Keys and values may be numbers of the query's type, or codes of 8 bits with scales: see `tile`.

Bytes:  2 * KV * D * L numbers per request of 2 or 4 bytes, of codes 1 byte, int8 with 4 * KV * L of scales; once for
        every 16 rows. 8 * H * D * L / split_tokens for the partial results.
FLOPs:  4 * H * D * L per query row.   Memory-bound until group * n is about 100.

Flash-decoding (Dao et al. 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html); Kwon et al. 2023 (arXiv 2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require
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

# Partial results stay below 1 % of the bytes that are read; a request of 8 KV heads and 8k tokens has 128 programs.
SPLIT_TOKENS = 512
COMBINE_WARPS = 4
MAX_QUERIES = 17  # a token and 16 drafts
COMBINED_SPLITS = 16  # in one step of the combination; part of the order of sums
ROWS = 16  # of a tile: the least that a matrix instruction takes, and `mma.sync` whatever the GPU


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sizes of tiles and grids. All but the last two follow from the model alone, never from the batch."""

    block_dim: int
    block_tokens: int
    split_tokens: int
    num_warps: int
    num_stages: int  # 5: two tiles of keys and values on their way, and the page ids of two more
    num_splits: int = 1
    row_tiles: int = 1


def tiles(head_dim: int, split_tokens: int = SPLIT_TOKENS, stored_as: StoredAs = StoredAs.NUMBERS) -> DecodePlan:
    """What is compiled for a head size. With a stage more, e4m3 would spill registers; with one less, int8."""
    block_dim = triton.next_power_of_2(head_dim)
    narrow = block_dim <= 128
    num_stages = 4 if stored_as is StoredAs.E4M3 else 5
    return DecodePlan(block_dim, 64 if narrow else 32, split_tokens, num_warps=4, num_stages=num_stages)


def plan(
    shape: Shape,
    requests: PagedRequests,
    split_tokens: int = SPLIT_TOKENS,
    stored_as: StoredAs = StoredAs.NUMBERS,
) -> DecodePlan:
    """Return how a batch is cut. `split_tokens`: a multiple of 64."""
    return replace(
        tiles(shape.head_dim, split_tokens, stored_as),
        num_splits=max(1, triton.cdiv(requests.max_length, split_tokens)),
        row_tiles=triton.cdiv(requests.max_queries * shape.group, ROWS),
    )


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
        "num_splits",
        "window",
    ]
)
def paged_decode(
    query,
    pool,
    kv_scales,
    tables,
    lengths,
    query_starts,
    attended_out,
    maxima,
    sums,
    query_row,
    query_head,
    pool_head,
    pool_slot,
    scale_head,
    table_row,
    num_kv_heads,
    group,
    num_splits,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    STORED_AS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """One split of 16 rows. `pool_head`, `pool_slot`: strides in units of `UNIT` numbers."""
    DTYPE: tl.constexpr = query.dtype.element_ty
    request = tl.program_id(0)
    kv_head = tl.program_id(1) % num_kv_heads
    first_of_tile = tl.program_id(1) // num_kv_heads * ROWS
    split = tl.program_id(2)
    length = tl.load(lengths + request).to(tl.int32)
    first_row = tl.load(query_starts + request)
    num_queries = (tl.load(query_starts + request + 1) - first_row).to(tl.int32)
    places = first_of_tile + tl.arange(0, ROWS)
    is_row = places < num_queries * group
    rows = first_row.to(tl.int64) + places // group
    heads = kv_head * group + places % group
    positions = length - num_queries + places // group
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM

    begin = split * SPLIT_TOKENS
    end = tl.minimum(begin + SPLIT_TOKENS, length)
    end = tl.where(first_of_tile < num_queries * group, end, 0)
    first_seen = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(length - num_queries + first_of_tile // group - window + 1, 0)
        # Whole tiles only: a tile begins at the same token for everyone.
        begin += tl.maximum(first_seen - begin, 0) // BLOCK_TOKENS * BLOCK_TOKENS

    places_of_query = rows[:, None] * query_row + heads[:, None] * query_head + dims[None, :]
    q = tl.load(query + places_of_query, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    keys = pool + (kv_head * UNIT).to(tl.int64) * pool_head
    values = pool + ((kv_head + num_kv_heads) * UNIT).to(tl.int64) * pool_head
    table = tables + request.to(tl.int64) * table_row
    key_scales = kv_scales + kv_head.to(tl.int64) * scale_head
    value_scales = kv_scales + (kv_head + num_kv_heads).to(tl.int64) * scale_head
    if STORED_AS == 2:
        scale *= tl.load(key_scales) * FACTOR

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    attended = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        # Not only the scores are masked: a stale value may be NaN, and 0 * NaN is NaN.
        is_token = tokens < end
        if HAS_WINDOW:
            is_token &= tokens >= first_seen
        slots = token_slots(table, tokens, is_token, PAGE)
        places_of_tokens = slots * pool_slot * UNIT
        k = tl.load(
            keys + places_of_tokens[None, :] + dims[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0
        )
        scale_of_scores = scale
        if STORED_AS == 1:
            scale_of_scores = scale * token_scales(key_scales, slots, is_token)[None, :]
        scores = scores_of(q, numbers_of(k, DTYPE, STORED_AS), scale_of_scores, softcap, HAS_SOFTCAP)
        seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen &= tokens[None, :] > positions[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        v = tl.load(
            values + places_of_tokens[:, None] + dims[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0
        )
        v = values_of(v, DTYPE, STORED_AS)
        if STORED_AS == 1:
            of_values = token_scales(value_scales, slots, is_token) * FACTOR
            maximum, total, attended = attend_tile(maximum, total, attended, scores, v, of_values)
        else:
            maximum, total, attended = attend_tile(maximum, total, attended, scores, v)

    if STORED_AS == 1:
        attended = attended * (1.0 / FACTOR)
    if STORED_AS == 2:
        attended = attended * (tl.load(value_scales) * FACTOR)
    is_row &= begin < end
    partials = (rows * num_kv_heads * group + heads) * num_splits + split
    tl.store(maxima + partials, maximum, mask=is_row)
    tl.store(sums + partials, total, mask=is_row)
    places_of_result = partials[:, None] * HEAD_DIM + dims[None, :]
    tl.store(attended_out + places_of_result, attended, mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_heads", "num_splits", "window"])
def combine_splits(
    attended,
    maxima,
    sums,
    lengths,
    query_starts,
    output,
    num_heads,
    num_splits,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """One row of one head: sum_s 2^(m_s - m) a_s / sum_s 2^(m_s - m) l_s, by 16 splits at a time from split 0 on."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    place = tl.program_id(2)
    first_row = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - first_row
    length = tl.load(lengths + request).to(tl.int32)
    is_row = place < num_queries
    position = length - num_queries.to(tl.int32) + place
    end = tl.where(is_row, tl.maximum(position, -1) // SPLIT_TOKENS + 1, 0)
    end = tl.where(length > 0, end, 0)
    first = tl.maximum(position - window + 1, 0) // SPLIT_TOKENS
    row = (first_row.to(tl.int64) + place) * num_heads + head
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM

    maximum = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(first // COMBINED * COMBINED, end, COMBINED):
        splits = start + tl.arange(0, COMBINED)
        is_split = (splits >= first) & (splits < end)
        partials = row * num_splits + splits
        own = tl.load(maxima + partials, mask=is_split, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(own, 0))
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        kept = tl.exp2(maximum - reference)
        weights = tl.exp2(own - reference)
        total = total * kept + tl.sum(weights * tl.load(sums + partials, mask=is_split, other=0.0), 0)
        places = partials[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(attended + places, mask=is_split[:, None] & is_dim[None, :], other=0.0)
        result = result * kept + tl.sum(weights[:, None] * part, 0)
        maximum = new_maximum
    result = result / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=is_dim & is_row)


def paged_decode_attention(
    query: Tensor,
    pool: Tensor,
    requests: PagedRequests,
    scores: Scores,
    *,
    kv_scales: Tensor | None = None,
    output: Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """Attend with up to 17 query rows per request.

    Args:
        query: `[T, H, D]` in bfloat16, float16 or float32, dense in D. Rows outside all requests are not written.
        pool: `[2 * KV, slots, D]`, keys, then values, in the query's dtype; or codes: int8, or uint8, the bits of
            float8_e4m3fn. Strides are multiples of 16 numbers.
        kv_scales: of codes. int8: float16 `[2 * KV, slots]`, dense in slots; e4m3: float32 `[2 * KV]`.
        output: `[T, H, D]`, contiguous, in the query's dtype; allocated by default.
        split_tokens: the same for all calls of a model.

    Returns: `output`. A request of length 0 gets zeros.

    Raises:
        KernelArgumentError: naming the argument.
    """
    shape = check(query, pool, requests, scores, kv_scales)
    require(requests.max_queries <= MAX_QUERIES, "max_queries", f"is {requests.max_queries}; at most {MAX_QUERIES}")
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    require(output.is_contiguous() and output.shape == query.shape, "output", "is not contiguous in the query's shape")
    stored_as = StoredAs.of(pool.dtype)
    own = plan(shape, requests, split_tokens, stored_as)
    count = requests.lengths.shape[0]
    if count == 0 or shape.num_rows == 0:
        return output
    partials = (shape.num_rows, shape.num_heads, own.num_splits)
    attended = torch.empty((*partials, shape.head_dim), dtype=torch.float32, device=query.device)
    maxima, sums = (torch.empty(partials, dtype=torch.float32, device=query.device) for _ in range(2))
    scale, softcap = scores.in_base_2()
    window = scores.window if scores.window is not None else NO_WINDOW
    paged_decode[(count, shape.num_kv_heads * own.row_tiles, own.num_splits)](
        query,
        pool,
        pool if kv_scales is None else kv_scales,
        requests.tables,
        requests.lengths,
        requests.query_starts,
        attended,
        maxima,
        sums,
        query.stride(0),
        query.stride(1),
        pool.stride(0) // STRIDE_UNIT,
        pool.stride(1) // STRIDE_UNIT,
        0 if kv_scales is None else kv_scales.stride(0),
        requests.tables.stride(0),
        shape.num_kv_heads,
        shape.group,
        own.num_splits,
        window,
        scale,
        softcap,
        **_decode_constants(own, shape.head_dim, requests.block_size_tokens, scores, stored_as),
        num_warps=own.num_warps,
        num_stages=own.num_stages,
    )
    combine_splits[(count, shape.num_heads, requests.max_queries)](
        attended,
        maxima,
        sums,
        requests.lengths,
        requests.query_starts,
        output,
        shape.num_heads,
        own.num_splits,
        window,
        **_combine_constants(own, shape.head_dim),
        num_warps=COMBINE_WARPS,
    )
    return output


def _decode_constants(
    own: DecodePlan, head_dim: int, page: int, scores: Scores, stored_as: StoredAs
) -> dict[str, int | float | bool]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": own.block_dim,
        "BLOCK_TOKENS": own.block_tokens,
        "SPLIT_TOKENS": own.split_tokens,
        "PAGE": page,
        "ROWS": ROWS,
        "UNIT": STRIDE_UNIT,
        "HAS_WINDOW": scores.window is not None,
        "HAS_SOFTCAP": scores.softcap is not None,
        "STORED_AS": int(stored_as),
        "FACTOR": FACTORS[stored_as],
    }


def _combine_constants(own: DecodePlan, head_dim: int) -> dict[str, int]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": own.block_dim,
        "SPLIT_TOKENS": own.split_tokens,
        "COMBINED": COMBINED_SPLITS,
    }


def decode_variants() -> Iterator[Variant]:
    """Those of models in 16 bits with blocks of 16 tokens."""
    for dtype, head_dim, scores, stored_as in production():
        own = tiles(head_dim, stored_as=stored_as)
        pointers = {"query": f"*{dtype}"} | pool_types(dtype, stored_as)
        partials = {"attended_out": "*fp32", "maxima": "*fp32", "sums": "*fp32"}
        integers = paged_decode.arg_names[9:19]
        yield Variant(
            variant_name(dtype, head_dim, scores, stored_as),
            paged_decode,
            pointers | INDICES | partials | dict.fromkeys(integers, "i32") | {"scale": "fp32", "softcap": "fp32"},
            _decode_constants(own, head_dim, 16, scores, stored_as),
            TensorCores.MMA,
            own.num_warps,
            own.num_stages,
        )
    for dtype, head_dim in sorted({(dtype, head_dim) for dtype, head_dim, *_ in production()}):
        arguments = {"attended": "*fp32", "maxima": "*fp32", "sums": "*fp32", "lengths": "*i32", "query_starts": "*i32"}
        arguments |= {"output": f"*{dtype}", "num_heads": "i32", "num_splits": "i32", "window": "i32"}
        constants = _combine_constants(tiles(head_dim), head_dim)
        yield Variant(f"{dtype}-head{head_dim}", combine_splits, arguments, constants, TensorCores.NONE, COMBINE_WARPS)
