"""The order of rows for products by experts: those of one expert follow one another, in whole tiles.

An assignment is a token and one of its experts, numbered token * k + place. Mathematics: let n_e be the assignments of
expert e and R the rows of a tile. Expert e has ceil(n_e / R) tiles behind those of the experts before, and its
assignments fill them in the order of their numbers.

    assignments     0:e2  1:e0  2:e2  3:e2  4:e0  5:e5           R = 2
    rows            | 1  4 | 0  2 | 3  - | 5  - |  ..            -: padding, -1
    experts of tiles   0      2      2      5     -1 ..          -1: beyond the last

Nothing is read back: sizes are upper bounds, A / R + min(A, E) tiles for A assignments, and tiles beyond the last have
no expert. One program per expert counts, then one per expert places: no atomic operation decides an order.

Bytes:  4 * A per expert in each of both passes, from L2; 8 * A written.
FLOPs:  about 4 * A per expert.   A few us in a decode; E * A is 8 million for 8k tokens of 8 among 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from millstream_kernels.arguments import require, require_tensor
from millstream_kernels.experts.routing import MAX_EXPERTS
from millstream_kernels.variant import TensorCores, Variant

BLOCK = 1024
NUM_WARPS = 4
ROWS = (16, 64)  # of a tile


@dataclass(frozen=True, slots=True)
class Placement:
    """See the top of the file; all int32."""

    rows: Tensor  # [tiles * R], assignments; -1: padding. Beyond the last tile that has an expert: anything
    tile_experts: Tensor  # [tiles]; -1: none
    places: Tensor  # [A], the row of each assignment
    top_k: int
    tile_rows: int  # R


def tile_rows(num_assignments: int, num_experts: int) -> int:
    """Rows of a tile: 64 where an expert has so many on average, which `wgmma` wants."""
    return ROWS[num_assignments >= ROWS[1] // 2 * num_experts]


def max_tiles(num_assignments: int, num_experts: int, rows: int) -> int:
    """Upper bound of the tiles that have an expert."""
    return num_assignments // rows + min(num_assignments, num_experts)


@triton.jit(do_not_specialize=["num_assignments"])
def count_assignments(experts, counts, num_assignments, BLOCK: tl.constexpr):
    """Those of one expert."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_assignments, BLOCK):
        numbers = start + tl.arange(0, BLOCK)
        own = tl.load(experts + numbers, mask=numbers < num_assignments, other=-1)
        found += (own == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_assignments", "num_experts", "num_tiles"])
def place_assignments(
    experts,
    counts,
    rows,
    tile_experts,
    places,
    num_assignments,
    num_experts,
    num_tiles,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_EXPERTS: tl.constexpr,
):
    """Those of one expert; the last one ends the list of tiles."""
    expert = tl.program_id(0)
    others = tl.arange(0, MAX_EXPERTS)
    of_others = tl.load(counts + others, mask=others < expert, other=0)
    first_tile = tl.sum((of_others + ROWS - 1) // ROWS, 0)
    count = tl.load(counts + expert)
    own_tiles = (count + ROWS - 1) // ROWS

    before = first_tile * ROWS
    for start in range(0, num_assignments, BLOCK):
        numbers = start + tl.arange(0, BLOCK)
        is_own = tl.load(experts + numbers, mask=numbers < num_assignments, other=-1) == expert
        targets = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(rows + targets, numbers, mask=is_own)
        tl.store(places + numbers, targets, mask=is_own)
        before += tl.sum(is_own.to(tl.int32), 0)
    padding = before + tl.arange(0, ROWS)
    tl.store(rows + padding, tl.full((ROWS,), -1, tl.int32), mask=padding < (first_tile + own_tiles) * ROWS)

    end = tl.where(expert == num_experts - 1, num_tiles, first_tile + own_tiles)
    for start in range(first_tile, end, BLOCK):
        tiles = start + tl.arange(0, BLOCK)
        of_tile = tl.where(tiles < first_tile + own_tiles, expert, -1)
        tl.store(tile_experts + tiles, of_tile, mask=tiles < end)


def place(experts: Tensor, num_experts: int, rows: int) -> Placement:
    """Order the assignments of tokens to experts.

    Args:
        experts: `[T, k]` int32, contiguous, 0 to `num_experts` - 1 (`Routing.experts`); not checked.
        rows: of a tile, 16 or 64 (`tile_rows`).

    Raises:
        KernelArgumentError: naming the argument.
    """
    require_tensor("experts", experts, (None, None), {torch.int32})
    require(experts.is_contiguous(), "experts", "is not contiguous")
    require(0 < num_experts <= MAX_EXPERTS, "num_experts", f"is {num_experts}; 1 to {MAX_EXPERTS} are expected")
    require(rows in ROWS, "rows", f"is {rows}; 16 or 64 is expected")
    count, device = experts.numel(), experts.device
    require(count < 1 << 30, "experts", f"has {count} assignments; fewer than 2 ** 30 are expected")
    tiles = max_tiles(count, num_experts, rows)
    sizes = (tiles * rows, tiles, count, num_experts)
    of_rows, of_tiles, places, counts = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    if count:
        count_assignments[(num_experts,)](experts, counts, count, BLOCK=BLOCK, num_warps=NUM_WARPS)
        place_assignments[(num_experts,)](
            experts,
            counts,
            of_rows,
            of_tiles,
            places,
            count,
            num_experts,
            tiles,
            **_constants(num_experts, rows),
            num_warps=NUM_WARPS,
        )
    return Placement(of_rows, of_tiles, places, experts.shape[1], rows)


def _constants(num_experts: int, rows: int) -> dict[str, int]:
    return {"ROWS": rows, "BLOCK": BLOCK, "MAX_EXPERTS": max(128, triton.next_power_of_2(num_experts))}


def placement_variants() -> Iterator[Variant]:
    """Up to 128 experts, and up to 256. A few numbers are read many times, from caches: loads are short."""
    arguments = {"experts": "*i32", "counts": "*i32", "num_assignments": "i32"}
    yield Variant("any", count_assignments, arguments, {"BLOCK": BLOCK}, TensorCores.NONE, NUM_WARPS, wide_loads=False)
    for num_experts in (128, 256):
        for rows in ROWS:
            arguments = dict.fromkeys(place_assignments.arg_names[:5], "*i32")
            arguments |= dict.fromkeys(place_assignments.arg_names[5:8], "i32")
            constants = _constants(num_experts, rows)
            yield Variant(
                f"{num_experts}-rows{rows}",
                place_assignments,
                arguments,
                constants,
                TensorCores.NONE,
                NUM_WARPS,
                wide_loads=False,
            )
