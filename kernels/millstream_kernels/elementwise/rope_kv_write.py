"""Queries and keys normed and rotated, keys and values stored in the paged pool, in one pass.

Mathematics, per token at position p, for each head of queries and keys, in float32:

    n = round(h / sqrt(mean(h ** 2) + eps) * w)                                 where the model norms heads (QK norm)
    r[i] = round(n[i] * cos(p, i) -+ n[partner of i] * sin(p, i))               the first `rotary_dim` numbers turn

    half-split (NeoX)   partner of i: i + half, i - half        | x x x x | y y y y | not turned |
    interleaved         partner of i: i + 1, i - 1              | x y x y | x y x y | not turned |

Values are not turned. The rotated query goes to a tensor of its own: its numbers are read by other threads than those
that write them. Keys and values go to slot s of their heads, `pool[head, s]`; a slot below 0 is skipped (padding).

    stored as they are; as int8 with a float16 scale per token and head; or as e4m3 by a static scale per head

Codes are those that the engine's pools make of the same rounded numbers. One program: one token, 8 heads.

Bytes:  per token (H + 2 KV) * D read, H * D written, 2 * KV * D stored (1 byte each when quantized).
FLOPs:  about 6 per number, 4 more with the norm.   Memory-bound.

Su et al. 2021 (arXiv 2104.09864); GPT-NeoX (Black et al. 2022, arXiv 2204.06745) for half-splits; Dehghani et al. 2023
(arXiv 2302.05442) for QK norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor, require_unit_stride
from millstream_kernels.elementwise.codes import e4m3_codes, int8_codes, largest_of
from millstream_kernels.stored_as import StoredAs
from millstream_kernels.variant import TensorCores, Variant

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
UNIT = 8  # strides of heads are passed in units of 8 numbers: 16 bytes of 16 bits, and the compiler knows it
POOL_UNIT = 16  # strides of the pool
MAX_HEAD_DIM = 256
HEADS = 8  # of a program


@dataclass(frozen=True, slots=True)
class Rotary:
    """Angles of every position; pair i turns by angle i."""

    cos: Tensor  # [positions, rotary_dim / 2], float32, dense rows
    sin: Tensor  # alike, with the same strides
    interleaved: bool = False  # neighbours are a pair, not i and i + rotary_dim / 2


@dataclass(frozen=True, slots=True)
class PagedPool:
    """One layer's keys, then values, by head: the engine's `LayerPool`."""

    stored: Tensor  # [2 * KV, slots, D], dense in D: the model's type, int8, or uint8 (bits of float8_e4m3fn)
    scales: Tensor | None = None  # int8: float16 [2 * KV, slots], written; uint8: float32 [2 * KV], read

    @property
    def stored_as(self) -> StoredAs:
        return StoredAs.of(self.stored.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each query and key head."""

    weight: Tensor  # [H + KV, D], contiguous, in the type of the heads or float32; Gemma's 1 is in it
    eps: float


def plan(count: int, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Return the grid: tokens, groups of heads."""
    return count, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)


def unsupported(head_dim: int) -> str | None:
    """Why the kernel does not take heads of a size."""
    if head_dim % POOL_UNIT == 0 and 0 < head_dim <= MAX_HEAD_DIM:
        return None
    return f"head size {head_dim}: multiples of {POOL_UNIT} up to {MAX_HEAD_DIM} are supported"


def num_warps(head_dim: int) -> int:
    """Of a program: each thread has 8 numbers or more, 16 bytes."""
    return 2 if head_dim <= 64 else 4


@triton.jit
def _normed(loaded, weight, mask, length, HAS_NORM: tl.constexpr):
    """`[heads, D]` in float32, normed and rounded where the model norms heads."""
    result = loaded.to(tl.float32)
    if HAS_NORM:
        result = tl.div_rn(result, length[:, None]) * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
        result = result.to(loaded.dtype).to(tl.float32)
    return result


@triton.jit
def _store(pool, pool_scales, places, scale_places, result, mask, is_stored, scale_of_head, STORED_AS: tl.constexpr):
    """Heads `[heads, D]`, rounded to the model's type, as the pool keeps them."""
    if STORED_AS == 0:
        tl.store(pool + places, result, mask=mask)
    elif STORED_AS == 1:
        numbers = tl.where(mask, result.to(tl.float32), 0.0)
        scale = tl.div_rn(largest_of(numbers), 127.0).to(tl.float16)
        tl.store(pool_scales + scale_places, scale, mask=is_stored)
        # By the scale as it is stored. Where that is 0, numbers are less than a float16 can be: their codes are 0.
        wide = scale.to(tl.float32)
        divisor = tl.where(wide == 0.0, float("inf"), wide)
        tl.store(pool + places, int8_codes(tl.div_rn(numbers, divisor[:, None])), mask=mask)
    else:
        quotients = tl.div_rn(result.to(tl.float32), scale_of_head[:, None])
        tl.store(pool + places, e4m3_codes(quotients), mask=mask)


@triton.jit(
    do_not_specialize=[
        "qkv_row",
        "qkv_head",
        "angle_row",
        "pool_head",
        "pool_slot",
        "scale_head",
        "num_heads",
        "num_kv_heads",
    ],
    # Parts of one array of numbers, which begin anywhere.
    do_not_specialize_on_alignment=["positions", "slots"],
)
def rope_kv_write_heads(
    qkv,
    norm_weight,
    cos,
    sin,
    positions,
    slots,
    query_out,
    pool,
    pool_scales,
    qkv_row,
    qkv_head,
    angle_row,
    pool_head,
    pool_slot,
    scale_head,
    num_heads,
    num_kv_heads,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    POOL_UNIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STORED_AS: tl.constexpr,
):
    """`HEADS` heads of one token. Strides of `qkv` are in units of `UNIT`, of `pool` of `POOL_UNIT` numbers."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    turns = heads < num_heads + num_kv_heads
    is_head = heads < num_heads + 2 * num_kv_heads
    mask = is_head[:, None] & is_dim[None, :]
    row = qkv + token * qkv_row * UNIT + heads.to(tl.int64)[:, None] * qkv_head * UNIT
    raw = tl.load(row + dims[None, :], mask=mask, other=0.0)

    if INTERLEAVED:
        partners, angles, is_first = dims ^ 1, dims // 2, dims % 2 == 0
    else:
        partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
        angles, is_first = tl.where(dims < HALF, dims, dims - HALF), dims < HALF
    in_pair = dims < ROTARY_DIM
    own_mask, partner_mask = mask & turns[:, None], turns[:, None] & in_pair[None, :]
    length = tl.full((HEADS,), 1.0, tl.float32)
    if HAS_NORM:
        wide = raw.to(tl.float32)
        length = tl.sqrt_rn(tl.sum(wide * wide, 1) / HEAD_DIM + eps)
    weight = norm_weight + heads[:, None] * HEAD_DIM
    partner = tl.load(row + partners[None, :], mask=partner_mask, other=0.0)
    own = _normed(raw, weight + dims[None, :], own_mask, length, HAS_NORM)
    partner = _normed(partner, weight + partners[None, :], partner_mask, length, HAS_NORM)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * angle_row + angles, mask=in_pair, other=1.0)
    s = tl.load(sin + position * angle_row + angles, mask=in_pair, other=0.0)
    turned = own * c[None, :] + partner * tl.where(is_first, -s, s)[None, :]
    result = tl.where(turns[:, None], turned, raw.to(tl.float32)).to(raw.dtype)

    query_places = (token * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(query_out + query_places, result, mask=mask & (heads < num_heads)[:, None])
    slot = tl.load(slots + token).to(tl.int64)
    pool_heads = (heads - num_heads).to(tl.int64)
    is_stored = is_head & (heads >= num_heads) & (slot >= 0)
    places = pool_heads[:, None] * pool_head * POOL_UNIT + slot * pool_slot * POOL_UNIT + dims[None, :]
    scale_of_head = tl.full((HEADS,), 1.0, tl.float32)
    if STORED_AS == 2:
        scale_of_head = tl.load(pool_scales + pool_heads, mask=is_stored, other=1.0)
    scale_places = pool_heads * scale_head + slot
    is_number = is_stored[:, None] & is_dim[None, :]
    _store(pool, pool_scales, places, scale_places, result, is_number, is_stored, scale_of_head, STORED_AS)


def rope_kv_write(
    qkv: Tensor,
    num_heads: int,
    rotary: Rotary,
    positions: Tensor,
    slots: Tensor,
    pool: PagedPool,
    *,
    norm: HeadNorm | None = None,
    query: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, store keys and values; return the queries `[T, H, D]`.

    Args:
        qkv: `[T, H + 2 * KV, D]` in bfloat16, float16 or float32, queries, keys, values; dense in D, strides that are
            multiples of 8 numbers. D is a multiple of 16 up to 256. Not changed.
        num_heads: H.
        positions: `[T]` int32 or int64, rows of the angles. Not checked against their number.
        slots: `[T]` int32 or int64, of the pool; below 0: nothing is stored. Not checked against their number, and no
            two tokens may have one slot.
        norm: of each query and key head, before they turn.
        query: contiguous, where the queries go; allocated by default.

    Raises:
        KernelArgumentError: naming the argument.
    """
    num_kv_heads = _check(qkv, num_heads, rotary, positions, slots, pool, norm)
    count, _, head_dim = qkv.shape
    if query is None:
        query = torch.empty((count, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    require_tensor("query", query, (count, num_heads, head_dim), {qkv.dtype})
    require(query.is_contiguous(), "query", "is not contiguous")
    if count == 0:
        return query
    scales = pool.scales if pool.scales is not None else pool.stored
    rope_kv_write_heads[plan(count, num_heads, num_kv_heads)](
        qkv,
        qkv if norm is None else norm.weight,
        rotary.cos,
        rotary.sin,
        positions,
        slots,
        query,
        pool.stored,
        scales,
        qkv.stride(0) // UNIT,
        qkv.stride(1) // UNIT,
        rotary.cos.stride(0),
        pool.stored.stride(0) // POOL_UNIT,
        pool.stored.stride(1) // POOL_UNIT,
        scales.stride(0) if pool.stored_as == StoredAs.INT8 else 0,
        num_heads,
        num_kv_heads,
        0.0 if norm is None else norm.eps,
        **_constants(head_dim, 2 * rotary.cos.shape[1], rotary.interleaved, norm is not None, pool.stored_as),
        num_warps=num_warps(head_dim),
    )
    return query


def _check(
    qkv: Tensor,
    num_heads: int,
    rotary: Rotary,
    positions: Tensor,
    slots: Tensor,
    pool: PagedPool,
    norm: HeadNorm | None,
) -> int:
    """Key/value heads."""
    require_tensor("qkv", qkv, (None, None, None), DTYPES)
    require_unit_stride("qkv", qkv)
    count, heads, head_dim = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    fits = num_heads > 0 and num_kv_heads > 0 and heads == num_heads + 2 * num_kv_heads
    require(fits, "num_heads", f"is {num_heads} of {heads} heads; keys and as many values have to follow")
    problem = unsupported(head_dim)
    require(problem is None, "qkv", f"has {problem}")
    strides = qkv.stride()[:2]
    require(not any(one % UNIT for one in strides), "qkv", f"has strides {strides}, not multiples of {UNIT}")
    half = rotary.cos.shape[-1]
    require_tensor("cos", rotary.cos, (None, None), {torch.float32})
    require_tensor("sin", rotary.sin, tuple(rotary.cos.shape), {torch.float32})
    require(0 < 2 * half <= head_dim, "cos", f"turns {2 * half} numbers of a head of {head_dim}")
    require_unit_stride("cos", rotary.cos)
    require(rotary.cos.stride() == rotary.sin.stride(), "sin", "has other strides than cos")
    for name, indices in (("positions", positions), ("slots", slots)):
        require_tensor(name, indices, (count,), {torch.int32, torch.int64}, is_aligned=False)
        require(indices.is_contiguous(), name, "is not contiguous")
    if norm is not None:
        require_tensor("norm", norm.weight, (num_heads + num_kv_heads, head_dim), {qkv.dtype, torch.float32})
        require(norm.weight.is_contiguous(), "norm", "is not contiguous")
    _check_pool(pool, qkv.dtype, 2 * num_kv_heads, head_dim)
    return num_kv_heads


def _check_pool(pool: PagedPool, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    require_tensor("pool", pool.stored, (heads, None, head_dim), {dtype, torch.int8, torch.uint8})
    require_unit_stride("pool", pool.stored)
    strides = pool.stored.stride()[:2]
    require(not any(one % POOL_UNIT for one in strides), "pool", f"has strides {strides}, not multiples of {POOL_UNIT}")
    if pool.stored_as == StoredAs.NUMBERS:
        require(pool.scales is None, "pool", "has scales, but its numbers are stored as they are")
        return
    scales = pool.scales
    if scales is None:
        require(False, "pool", f"is {pool.stored.dtype} and has no scales")
    elif pool.stored_as == StoredAs.INT8:
        require_tensor("pool", scales, (heads, pool.stored.shape[1]), {torch.float16})
        require_unit_stride("pool", scales)
    else:
        require_tensor("pool", scales, (heads,), {torch.float32})
        require(scales.is_contiguous(), "pool", "has scales that are not contiguous")


def _constants(
    head_dim: int, rotary_dim: int, interleaved: bool, has_norm: bool, stored_as: StoredAs
) -> dict[str, int | bool]:
    return {
        "HEADS": HEADS,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": triton.next_power_of_2(head_dim),
        "ROTARY_DIM": rotary_dim,
        "UNIT": UNIT,
        "POOL_UNIT": POOL_UNIT,
        "INTERLEAVED": interleaved,
        "HAS_NORM": has_norm,
        "STORED_AS": int(stored_as),
    }


def rope_kv_write_variants() -> Iterator[Variant]:
    """Models in bfloat16 whose heads turn whole, with int64 positions and slots, as the engine has them."""
    formats = [(64, False, StoredAs.NUMBERS), (128, False, StoredAs.NUMBERS), (128, True, StoredAs.NUMBERS)]
    formats += [(256, True, StoredAs.NUMBERS), (128, False, StoredAs.INT8), (128, False, StoredAs.E4M3)]
    stored = {StoredAs.NUMBERS: ("*bf16", "*bf16"), StoredAs.INT8: ("*i8", "*fp16"), StoredAs.E4M3: ("*u8", "*fp32")}
    for head_dim, has_norm, stored_as in formats:
        pool, scales = stored[stored_as]
        arguments = {"qkv": "*bf16", "norm_weight": "*bf16", "cos": "*fp32", "sin": "*fp32"}
        arguments |= {"positions": "*i64", "slots": "*i64", "query_out": "*bf16", "pool": pool, "pool_scales": scales}
        arguments |= dict.fromkeys(rope_kv_write_heads.arg_names[9:17], "i32") | {"eps": "fp32"}
        yield Variant(
            f"bf16-head{head_dim}{'-norm' if has_norm else ''}-{stored_as.name.lower()}",
            rope_kv_write_heads,
            arguments,
            _constants(head_dim, head_dim, False, has_norm, stored_as),
            TensorCores.NONE,
            num_warps(head_dim),
            unaligned=frozenset({"positions", "slots"}),
        )
