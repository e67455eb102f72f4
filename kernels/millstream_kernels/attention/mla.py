"""Multi-head latent attention in its absorbed form over the paged pool: decodes, checks of drafts, and prompts.

All heads share one latent row per token, which is key and, in its first C numbers, value. Mathematics, for head h of
the token at p, query [q_c | q_r] of C + R numbers, cached row [c | r]:

    s_j = scale * (q_c c_j + q_r r_j)      j <= p          out = sum over j of softmax(s)_j c_j          C numbers

    rows of a program    16 or 32 of (queries x heads) of one request: a latent tile is loaded once for all of them,
                         and serves as keys and as values
    few queries          splits of 512 tokens, combined in base 2 as in `decode`
    prompts              no splits: one program takes all tokens that its rows see

Tiles have 32 tokens and begin at multiples of it, splits at multiples of 512: a row has one result, alone, in company,
as a row of a draft's check, and however its prompt is cut. A row of a prompt and one of a decode may differ in the last
bits. As in `w4a16` tiles of 16 and more rows are taken to sum alike.

Bytes:  2 * (C + R) * L per request and 16 or 32 rows, mostly from L2 beyond the first; partial results as in
        `decode`.
FLOPs:  2 * H * (2 * C + R) * L per query.   Memory-bound up to about 16 rows, else by the matrix units.

DeepSeek-AI 2024 (arXiv 2405.04434); FlashMLA (github.com/deepseek-ai/FlashMLA) for packing heads as rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.attention.decode import (
    COMBINE_WARPS,
    COMBINED_SPLITS,
    MAX_QUERIES,
    SPLIT_TOKENS,
    combine_splits,
)
from millstream_kernels.attention.specification import DTYPES, INDICES, NO_WINDOW, STRIDE_UNIT, PagedRequests
from millstream_kernels.attention.tile import LOG2_E, attend_tile, token_slots
from millstream_kernels.variant import TensorCores, Variant

BLOCK_TOKENS = 32  # part of the order of sums
FEW_ROWS, MANY_ROWS = 16, 32  # of a program; 64 would spill
MAX_LATENT, MAX_ROTARY = 512, 64


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """Sizes of tiles and grids. Only the rows of a program depend on the batch, and they change no bit of a row."""

    rows: int
    num_warps: int
    num_stages: int
    row_tiles: int
    num_splits: int
    writes_partials: bool


def unsupported(dtype: torch.dtype, latent_dim: int, rotary_dim: int) -> str | None:
    """Why the kernels do not take a model's latent attention; None: they do."""
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    sizes = ((latent_dim, MAX_LATENT), (rotary_dim, MAX_ROTARY))
    if all(size % STRIDE_UNIT == 0 and 0 < size <= most for size, most in sizes):
        return None
    return f"a latent of {latent_dim} + {rotary_dim}: multiples of 16 up to {MAX_LATENT} + {MAX_ROTARY} are supported"


def tiles(rows: int) -> tuple[int, int]:
    """Warps and stages of a program."""
    return (4, 3) if rows == FEW_ROWS else (8, 2)


def plan(num_heads: int, requests: PagedRequests, split_tokens: int = SPLIT_TOKENS) -> MlaPlan:
    """Return how a batch is cut. `split_tokens`: a multiple of 32."""
    most_rows = requests.max_queries * num_heads
    rows = FEW_ROWS if most_rows <= FEW_ROWS else MANY_ROWS
    is_split = requests.max_queries <= MAX_QUERIES
    num_splits = max(1, triton.cdiv(requests.max_length, split_tokens)) if is_split else 1
    return MlaPlan(rows, *tiles(rows), triton.cdiv(most_rows, rows), num_splits, is_split)


@triton.jit(do_not_specialize=["query_row", "query_head", "pool_slot", "table_row", "num_heads", "num_splits"])
def mla_rows(
    query,
    pool,
    tables,
    lengths,
    query_starts,
    attended_out,
    maxima,
    sums,
    query_row,
    query_head,
    pool_slot,
    table_row,
    num_heads,
    num_splits,
    scale,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Some rows of one request. `query_row`, `query_head`, `pool_slot`: strides in units of `UNIT` numbers."""
    request = tl.program_id(0)
    first_of_tile = tl.program_id(1) * ROWS
    split = tl.program_id(2)
    length = tl.load(lengths + request).to(tl.int32)
    first_row = tl.load(query_starts + request)
    num_queries = (tl.load(query_starts + request + 1) - first_row).to(tl.int32)
    places = first_of_tile + tl.arange(0, ROWS)
    is_row = places < num_queries * num_heads
    rows = first_row.to(tl.int64) + places // num_heads
    heads = places % num_heads
    positions = length - num_queries + places // num_heads
    latents, rotaries = tl.arange(0, BLOCK_LATENT), tl.arange(0, BLOCK_ROTARY)
    is_latent, is_rotary = latents < LATENT, rotaries < ROTARY

    last = tl.minimum(first_of_tile + ROWS, num_queries * num_heads) - 1
    end = tl.where(last >= first_of_tile, length - num_queries + last // num_heads + 1, 0)
    begin = 0
    if PARTIAL:
        begin = split * SPLIT_TOKENS
        end = tl.minimum(begin + SPLIT_TOKENS, end)
    places_of_query = query + (rows * query_row + heads * query_head)[:, None] * UNIT
    q_latent = tl.load(places_of_query + latents[None, :], mask=is_row[:, None] & is_latent[None, :], other=0.0)
    q_rotary = tl.load(
        places_of_query + LATENT + rotaries[None, :], mask=is_row[:, None] & is_rotary[None, :], other=0.0
    )
    table = tables + request.to(tl.int64) * table_row

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    attended = tl.zeros((ROWS, BLOCK_LATENT), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        tokens = start + tl.arange(0, BLOCK_TOKENS)
        # Not only the scores are masked: a stale value may be NaN, and 0 * NaN is NaN.
        is_token = tokens < end
        cached = pool + (token_slots(table, tokens, is_token, PAGE) * pool_slot * UNIT)[:, None]
        latent = tl.load(cached + latents[None, :], mask=is_token[:, None] & is_latent[None, :], other=0.0)
        rotary = tl.load(cached + LATENT + rotaries[None, :], mask=is_token[:, None] & is_rotary[None, :], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotary, tl.trans(rotary), scores, input_precision="ieee") * scale
        seen = is_token[None, :] & (tokens[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        maximum, total, attended = attend_tile(maximum, total, attended, scores, latent)

    if PARTIAL:
        partials = (rows * num_heads + heads) * num_splits + split
        # A split that begins behind a row is not combined.
        is_row &= begin < end
        tl.store(maxima + partials, maximum, mask=is_row)
        tl.store(sums + partials, total, mask=is_row)
        targets = partials[:, None] * LATENT + latents[None, :]
        tl.store(attended_out + targets, attended, mask=is_row[:, None] & is_latent[None, :])
    else:
        result = attended / tl.where(total == 0.0, 1.0, total)[:, None]
        targets = (rows * num_heads + heads)[:, None] * LATENT + latents[None, :]
        stored = result.to(attended_out.dtype.element_ty)
        tl.store(attended_out + targets, stored, mask=is_row[:, None] & is_latent[None, :])


def mla_attention(
    query: Tensor,
    pool: Tensor,
    latent_dim: int,
    requests: PagedRequests,
    scale: float,
    *,
    output: Tensor | None = None,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """Attend with any number of query rows per request.

    Args:
        query: `[T, H, C + R]` in bfloat16, float16 or float32, dense in its last dimension; strides are multiples of 16
            numbers. Rows outside all requests are not written.
        pool: `[1, slots, C + R]`; strides are multiples of 16 numbers.
        latent_dim: C, a multiple of 16 up to 512; R is one up to 64.
        output: `[T, H, C]`, contiguous, in the query's dtype; allocated by default.
        split_tokens: the same for all calls of a model.

    Returns: `output`. A request of length 0 gets zeros.

    Raises:
        KernelArgumentError: naming the argument.
    """
    _check(query, pool, latent_dim, requests)
    num_rows, num_heads, size = query.shape
    shape = (num_rows, num_heads, latent_dim)
    if output is None:
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
    require_tensor("output", output, shape, {query.dtype})
    require(output.is_contiguous(), "output", "is not contiguous")
    count = requests.lengths.shape[0]
    if count == 0 or num_rows == 0:
        return output
    own = plan(num_heads, requests, split_tokens)
    attended, maxima, sums = output, output, output
    if own.writes_partials:
        partials = (num_rows, num_heads, own.num_splits)
        attended = torch.empty((*partials, latent_dim), dtype=torch.float32, device=query.device)
        maxima, sums = (torch.empty(partials, dtype=torch.float32, device=query.device) for _ in range(2))
    mla_rows[(count, own.row_tiles, own.num_splits)](
        query,
        pool,
        requests.tables,
        requests.lengths,
        requests.query_starts,
        attended,
        maxima,
        sums,
        query.stride(0) // STRIDE_UNIT,
        query.stride(1) // STRIDE_UNIT,
        pool.stride(1) // STRIDE_UNIT,
        requests.tables.stride(0),
        num_heads,
        own.num_splits,
        scale * LOG2_E,
        **_constants(own, latent_dim, size - latent_dim, requests.block_size_tokens, split_tokens),
        num_warps=own.num_warps,
        num_stages=own.num_stages,
    )
    if own.writes_partials:
        combine_splits[(count, num_heads, requests.max_queries)](
            attended,
            maxima,
            sums,
            requests.lengths,
            requests.query_starts,
            output,
            num_heads,
            own.num_splits,
            NO_WINDOW,
            **_combine_constants(latent_dim, split_tokens),
            num_warps=COMBINE_WARPS,
        )
    return output


def _check(query: Tensor, pool: Tensor, latent_dim: int, requests: PagedRequests) -> None:
    require_tensor("query", query, (None, None, None), DTYPES)
    size = query.shape[2]
    problem = unsupported(query.dtype, latent_dim, size - latent_dim)
    require(problem is None, "latent_dim", f"gives {problem}")
    require_tensor("pool", pool, (1, None, size), {query.dtype})
    for name, tensor in (("query", query), ("pool", pool)):
        require_unit_stride(name, tensor)
        strides = tensor.stride()[:2]
        require(not any(one % STRIDE_UNIT for one in strides), name, f"has strides {strides}, not multiples of 16")
    count, integers = requests.lengths.shape[0], {torch.int32, torch.int64}
    require_tensor("tables", requests.tables, (count, None), integers)
    require_unit_stride("tables", requests.tables)
    require_tensor("lengths", requests.lengths, (count,), integers)
    require_tensor("query_starts", requests.query_starts, (count + 1,), integers)
    width_tokens = requests.tables.shape[1] * requests.block_size_tokens
    fits = requests.max_length <= width_tokens
    require(fits, "max_length", f"is {requests.max_length}; tables hold {width_tokens} tokens")
    page = requests.block_size_tokens
    require(triton.next_power_of_2(page) == page, "block_size_tokens", f"is {page}; a power of two is expected")


def _constants(own: MlaPlan, latent: int, rotary: int, page: int, split_tokens: int) -> dict[str, int | bool]:
    return {
        "LATENT": latent,
        "ROTARY": rotary,
        "BLOCK_LATENT": max(16, triton.next_power_of_2(latent)),
        "BLOCK_ROTARY": max(16, triton.next_power_of_2(rotary)),
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "SPLIT_TOKENS": split_tokens,
        "PAGE": page,
        "ROWS": own.rows,
        "UNIT": STRIDE_UNIT,
        "PARTIAL": own.writes_partials,
    }


def _combine_constants(latent: int, split_tokens: int) -> dict[str, int]:
    block = max(16, triton.next_power_of_2(latent))
    return {"HEAD_DIM": latent, "BLOCK_DIM": block, "SPLIT_TOKENS": split_tokens, "COMBINED": COMBINED_SPLITS}


def mla_variants() -> Iterator[Variant]:
    """DeepSeek-V2 and V3 in bfloat16, 512 + 64: decodes of few heads and of many, and prompts."""
    for rows, is_partial in ((FEW_ROWS, True), (MANY_ROWS, True), (MANY_ROWS, False)):
        own = MlaPlan(rows, *tiles(rows), 1, 1, is_partial)
        arguments = {"query": "*bf16", "pool": "*bf16"} | INDICES
        arguments |= dict.fromkeys(("attended_out", "maxima", "sums"), "*fp32" if is_partial else "*bf16")
        yield Variant(
            f"bf16-512-64-rows{rows}{'-partial' if is_partial else ''}",
            mla_rows,
            arguments | dict.fromkeys(mla_rows.arg_names[8:14], "i32") | {"scale": "fp32"},
            _constants(own, 512, 64, 16, SPLIT_TOKENS),
            TensorCores.MMA,
            own.num_warps,
            own.num_stages,
        )
    arguments = {"attended": "*fp32", "maxima": "*fp32", "sums": "*fp32", "lengths": "*i32", "query_starts": "*i32"}
    arguments |= {"output": "*bf16", "num_heads": "i32", "num_splits": "i32", "window": "i32"}
    constants = _combine_constants(512, SPLIT_TOKENS)
    yield Variant("bf16-latent512", combine_splits, arguments, constants, TensorCores.NONE, COMBINE_WARPS)
