"""The variants of a linear kernel that the committed table of an architecture asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from millstream_kernels.tuning.candidates import FEW_ROWS, SPLIT_ROWS, Tiles
from millstream_kernels.tuning.table import table_of
from millstream_kernels.variant import TensorCores, Variant

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


def tuned_variants(
    kernel: Any,
    tiles: Iterable[tuple[str, Tiles, bool]],
    capability: int,
    name: str,
    dtype: str,
    operands: Mapping[str, str],
    numbers: Mapping[str, str],
    constants_of: Callable[[int, bool], Mapping[str, int | bool]],
) -> Iterator[Variant]:
    """The variants of `kernel` for a GPU: one per choice.

    Args:
        tiles: of `tuned_tiles`.
        name: what the names of the variants begin with.
        dtype: of the bias, and of an output that is no partial sum: "bf16".
        operands, numbers: the types of the arguments before the bias, and behind the output.
        constants_of: from rows of a tile, and whether partial sums are written.
    """
    for tiles_name, choice, is_partial in tiles:
        outputs = {"bias": f"*{dtype}", "output": "*fp32" if is_partial else f"*{dtype}"}
        yield Variant(
            f"{name}-{tiles_name}",
            kernel,
            {**operands, **outputs, **numbers},
            constants_of(choice.block_rows, is_partial),
            TensorCores.WGMMA,
            choice.num_warps,
            choice.num_stages,
            capabilities=(capability,),
        )
