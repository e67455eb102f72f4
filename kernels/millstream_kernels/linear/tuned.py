"""The variants of a linear kernel that the committed table of an architecture asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millstream_kernels.tuning.candidates import FEW_ROWS, SPLIT_ROWS, Tiles
from millstream_kernels.tuning.table import table_of

Wanted = Iterable[tuple[int | None, bool]]  # class of rows, whether a program writes the partial sum of a split
# Up to 16 rows partial sums are always written, up to 64 where a weight is split, beyond never.
USUAL: Wanted = ((FEW_ROWS, True), (SPLIT_ROWS, True), (SPLIT_ROWS, False), (None, False))


def tuned_tiles(kernel: str, capability: int, wanted: Wanted = USUAL) -> Iterator[tuple[str, Tiles, bool]]:
    """A name, the tiles, and whether partial sums are written: of each variant that `plan()` may choose.

    Classes that share a choice share a variant. A table that gives two classes the same rows but other warps or stages
    has both: the second is named `-more`.
    """
    found: dict[tuple[Tiles, bool], str] = {}
    classes = table_of(capability).kernels[kernel].by_class
    for most_rows, is_partial in wanted:
        tiles = classes[most_rows]
        if (tiles, is_partial) in found:
            continue
        name = f"rows{tiles.block_rows}{'-partial' if is_partial else ''}"
        if name in found.values():
            name = f"{name}-more"
        found[tiles, is_partial] = name
        yield name, tiles, is_partial
