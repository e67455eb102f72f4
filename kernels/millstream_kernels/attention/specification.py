"""What attention over the paged pool takes, and the checks that its kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError, require, require_tensor, require_unit_stride
from millstream_kernels.attention.tile import LOG2_E
from millstream_kernels.stored_as import StoredAs

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
MAX_HEAD_DIM = 256
NO_WINDOW = 1 << 30
STRIDE_UNIT = 16  # strides of the pool are passed in units of 16 numbers, so that the compiler knows they divide


@dataclass(frozen=True, slots=True)
class Scores:
    """How the scores of one layer are made."""

    scale: float  # on query times key
    window: int | None = None  # tokens that a token sees, itself included; None is all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)

    def in_base_2(self) -> tuple[float, float]:
        """`scale` and `softcap` as the kernels take them; see `tile.scores_of`."""
        if self.softcap is None:
            return self.scale * LOG2_E, 0.0
        return 2.0 * LOG2_E * self.scale / self.softcap, self.softcap * LOG2_E


@dataclass(frozen=True, slots=True)
class PagedRequests:
    """Where requests have their tokens. Everything is on the device; a graph replays it with other numbers."""

    tables: Tensor  # [R, width] int32 or int64, blocks of the pool; what lies behind a request's last is never read
    lengths: Tensor  # [R] int32 or int64, tokens in the pool with the new ones; 0: a padded request
    query_starts: Tensor  # [R + 1] int32 or int64, first query row of each request; the last is the number of rows
    max_queries: int  # of one request: an upper bound
    max_length: int  # an upper bound on `lengths`
    block_size_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that a kernel is compiled or launched for."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


def unsupported(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int) -> str | None:
    """Why the kernels do not take a model's attention; None: they do."""
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if head_dim % STRIDE_UNIT or not STRIDE_UNIT <= head_dim <= MAX_HEAD_DIM:
        return f"head size {head_dim}: multiples of {STRIDE_UNIT} up to {MAX_HEAD_DIM} are supported"
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        return f"{num_heads} query heads over {num_kv_heads} key/value heads"
    return None


def check(
    query: Tensor, pool: Tensor, requests: PagedRequests, scores: Scores, kv_scales: Tensor | None = None
) -> Shape:
    """The shape of a call. Raises KernelArgumentError, which names the argument."""
    require_tensor("query", query, (None, None, None), DTYPES)
    num_rows, num_heads, head_dim = query.shape
    check_stored(query.dtype, pool, (None, None, head_dim), kv_scales)
    require_unit_stride("query", query)
    require(pool.shape[0] % 2 == 0, "pool", f"has {pool.shape[0]} heads; keys, then as many of values are expected")
    problem = unsupported(query.dtype, head_dim, num_heads, pool.shape[0] // 2)
    if problem is not None:
        raise KernelArgumentError("query", f"has {problem}")
    require_strides("pool", pool)
    _check_requests(requests)
    require(scores.window is None or scores.window > 0, "window", f"is {scores.window}; at least 1 is expected")
    require(scores.softcap is None or scores.softcap > 0, "softcap", f"is {scores.softcap}; it must be positive")
    return Shape(num_rows, num_heads, pool.shape[0] // 2, head_dim)


def check_stored(dtype: torch.dtype, pool: Tensor, shape: tuple[int | None, ...], kv_scales: Tensor | None) -> StoredAs:
    """How a pool of `shape` keeps the numbers of a query of `dtype`. Raises KernelArgumentError."""
    require_tensor("pool", pool, shape, {dtype, torch.int8, torch.uint8})
    require_unit_stride("pool", pool)
    stored_as = StoredAs.of(pool.dtype)
    if stored_as is StoredAs.NUMBERS:
        require(kv_scales is None, "kv_scales", f"are given, but the pool has numbers of {dtype}, not codes")
        return stored_as
    if kv_scales is None:
        raise KernelArgumentError("kv_scales", f"are missing: a pool of {pool.dtype} has codes")
    if stored_as is StoredAs.INT8:
        require_tensor("kv_scales", kv_scales, (pool.shape[0], pool.shape[1]), {torch.float16})
    else:
        require_tensor("kv_scales", kv_scales, (pool.shape[0],), {torch.float32})
    require_unit_stride("kv_scales", kv_scales)
    return stored_as


def require_strides(argument: str, tensor: Tensor) -> None:
    """Those of all dimensions but the last are multiples of 16 numbers."""
    strides = tensor.stride()[:2]
    fits = not any(one % STRIDE_UNIT for one in strides)
    require(fits, argument, f"has strides {strides}, not multiples of {STRIDE_UNIT}")


def _check_requests(requests: PagedRequests) -> None:
    count = requests.lengths.shape[0]
    integers = {torch.int32, torch.int64}
    require_tensor("tables", requests.tables, (count, None), integers)
    require_unit_stride("tables", requests.tables)
    require(requests.lengths.dtype in integers, "lengths", f"is {requests.lengths.dtype}; int32 or int64 is expected")
    require(requests.lengths.is_contiguous(), "lengths", "is not contiguous")
    starts = requests.query_starts
    require(
        starts.shape == (count + 1,), "query_starts", f"has the shape {list(starts.shape)}; [{count + 1}] is expected"
    )
    require(starts.dtype in integers and starts.is_contiguous(), "query_starts", "is no dense tensor of integers")
    width_tokens = requests.tables.shape[1] * requests.block_size_tokens
    require(
        requests.max_length <= width_tokens,
        "max_length",
        f"is {requests.max_length}; tables hold {width_tokens} tokens",
    )
    require(
        triton.next_power_of_2(requests.block_size_tokens) == requests.block_size_tokens,
        "block_size_tokens",
        f"is {requests.block_size_tokens}; a power of two is expected",
    )


INDICES = {"tables": "*i32", "lengths": "*i32", "query_starts": "*i32"}  # as the runtime passes them
# dtype, head size, and what the scores have, of the models that are served: what is compiled ahead.
PRODUCTION = [
    *((dtype, head_dim, Scores(1.0)) for dtype in ("bf16", "fp16") for head_dim in (64, 128)),
    *(("bf16", head_dim, Scores(1.0)) for head_dim in (80, 96, 192, 256)),
    *(("bf16", head_dim, Scores(1.0, window=1)) for head_dim in (64, 96, 128, 256)),
    *(("bf16", head_dim, Scores(1.0, window, softcap=1.0)) for head_dim in (128, 256) for window in (None, 1)),
]
# The same with keys and values in 8 bits.
PRODUCTION_OF_CODES = [
    *(("bf16", head_dim, Scores(1.0)) for head_dim in (64, 96, 128, 256)),
    ("fp16", 128, Scores(1.0)),
    *(("bf16", head_dim, Scores(1.0, window=1)) for head_dim in (128, 256)),
    *(("bf16", 256, Scores(1.0, window, softcap=1.0)) for window in (None, 1)),
]


def production() -> Iterator[tuple[str, int, Scores, StoredAs]]:
    """What is compiled ahead: dtype, head size, scores, and how keys and values are stored."""
    for one in PRODUCTION:
        yield *one, StoredAs.NUMBERS
    for one in PRODUCTION_OF_CODES:
        yield *one, StoredAs.INT8
        yield *one, StoredAs.E4M3


def pool_types(dtype: str, stored_as: StoredAs) -> dict[str, str]:
    """Of the pool and of its scales; where there are none the pool stands in their place."""
    pool, scales = {
        StoredAs.NUMBERS: (dtype, dtype),
        StoredAs.INT8: ("i8", "fp16"),
        StoredAs.E4M3: ("u8", "fp32"),
    }[stored_as]
    return {"pool": f"*{pool}", "kv_scales": f"*{scales}"}


def variant_name(dtype: str, head_dim: int, scores: Scores, stored_as: StoredAs) -> str:
    """`bf16-head128-window-softcap-int8`."""
    has = f"{'-window' if scores.window else ''}{'-softcap' if scores.softcap else ''}"
    return f"{dtype}-head{head_dim}{has}{suffix_of(stored_as)}"


def suffix_of(stored_as: StoredAs) -> str:
    """Of a variant's name: `-int8`; "" for numbers."""
    return "" if stored_as is StoredAs.NUMBERS else f"-{stored_as.name.lower()}"
