"""Which tile sizes, warps and stages a table may name. Imports neither torch nor triton.

    class       rows of a product that share a choice: up to 16, up to 64, more
    candidate   rows of a tile x warps x stages

No candidate changes a bit of a result. The order in which a row's products are summed follows from the tiles of inputs
and the splits of a weight (`linear.splits`), and neither is a candidate: a table cannot undo that a row has one result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

FEW_ROWS, SPLIT_ROWS = 16, 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one program is shaped. None of it changes the order of a sum."""

    block_rows: int  # rows of x, the right operand
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Space:
    """The candidates of one kernel: what a class of rows may choose from."""

    block_rows: Mapping[int | None, tuple[int, ...]]  # by the most rows of a class, in order; None: any number
    num_warps: tuple[int, ...] = (4, 8)
    num_stages: tuple[int, ...] = (2, 3, 4, 5)

    def candidates(self, most_rows: int | None) -> list[Tiles]:
        """All of one class."""
        return [Tiles(*one) for one in product(self.block_rows[most_rows], self.num_warps, self.num_stages)]


# Up to 64 rows one tile holds all rows, so that a weight is read once.
_FEW: dict[int | None, tuple[int, ...]] = {FEW_ROWS: (FEW_ROWS,), SPLIT_ROWS: (SPLIT_ROWS,)}
SPACES: dict[str, Space] = {
    "w16a16": Space(_FEW, num_stages=(2, 3, 4, 5, 6)),
    "w8a16": Space(_FEW | {None: (64,)}),  # wider tiles would spill: two sums lie in registers
    "w8a8": Space(_FEW | {None: (64, 128)}),
    "nf4": Space(_FEW | {None: (64,)}),
    "w4a16": Space(_FEW | {None: (64, 128)}),
    "w4a16-small-groups": Space(_FEW | {None: (64,)}),  # groups of less than a tile; wider tiles would spill
}
