"""Choose among the candidates of a table by their times. Pure: what times them is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from millstream_kernels.tuning.candidates import SPACES, Tiles
from millstream_kernels.tuning.table import Table, classes_of

LEAST_GAIN = 0.02  # a candidate that is not this much quicker than the table's choice leaves it as it is
# How many rows of a class are timed: the fewest and the most, of many rows two prompts.
ROWS: dict[int | None, tuple[int, ...]] = {16: (1, 16), 64: (17, 64), None: (128, 2048)}
# Outputs and inputs of weights that are timed: the layers of an 8B model, whose heads and gates are joined.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))

Seconds = Callable[[str, Table, int, int, int], float | None]
"""Of one product: kernel, the table with the candidate, rows, outputs, inputs. None: the candidate does not start."""


def with_choice(table: Table, kernel: str, most_rows: int | None, tiles: Tiles) -> Table:
    """`table` with another choice for one class of one kernel."""
    choices = table.kernels[kernel]
    changed = replace(choices, by_class={**choices.by_class, most_rows: tiles})
    return replace(table, kernels={**table.kernels, kernel: changed})


def tuned(table: Table, kernel: str, measured_on: str, seconds: Seconds) -> Iterator[tuple[str, Table]]:
    """Time every class of one kernel. Yields a line for people and the table so far, after each class.

    Args:
        measured_on: the GPU's name, which the table keeps.
    """
    for most_rows in classes_of(kernel):
        before = table.kernels[kernel].by_class[most_rows]
        means = {
            tiles: _mean_seconds(with_choice(table, kernel, most_rows, tiles), kernel, most_rows, seconds)
            for tiles in SPACES[kernel].candidates(most_rows)
        }
        best = _best(means, before)
        table = with_choice(table, kernel, most_rows, best)
        named = replace(table.kernels[kernel], measured_on=measured_on)
        table = replace(table, kernels={**table.kernels, kernel: named})
        yield _line(kernel, most_rows, before, best, means), table


def _mean_seconds(table: Table, kernel: str, most_rows: int | None, seconds: Seconds) -> float:
    """The geometric mean over shapes and rows; infinite where the candidate does not start."""
    total, count = 0.0, 0
    for num_outputs, num_inputs in SHAPES:
        for num_rows in ROWS[most_rows]:
            found = seconds(kernel, table, num_rows, num_outputs, num_inputs)
            if found is None:
                return math.inf
            total, count = total + math.log(found), count + 1
    return math.exp(total / count)


def _best(means: dict[Tiles, float], before: Tiles) -> Tiles:
    best = min(means, key=means.__getitem__)
    return best if means[best] < means[before] * (1 - LEAST_GAIN) else before


def _line(kernel: str, most_rows: int | None, before: Tiles, best: Tiles, means: dict[Tiles, float]) -> str:
    rows = "more rows" if most_rows is None else f"up to {most_rows} rows"
    started = sum(math.isfinite(mean) for mean in means.values())
    change = "as before" if best == before else f"before {means[before] * 1e6:.1f} µs by {_named(before)}"
    return f"{kernel}, {rows}: {_named(best)}, {means[best] * 1e6:.1f} µs ({change}; {started} candidates)"


def _named(tiles: Tiles) -> str:
    return f"{tiles.block_rows} rows x {tiles.num_warps} warps x {tiles.num_stages} stages"
