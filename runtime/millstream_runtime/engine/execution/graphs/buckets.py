"""The sizes that decodes are padded to, so that a few recorded graphs serve steps of every size. Pure.

    rows     1 2 3 4 6 8 12 16 24 ... max_num_seqs    half octaves: at most a third of a step is padding
    width    4 8 16 32 ...            max_model_len   octaves, in blocks of each row's table

A step takes the smallest bucket that holds it. There is none where the padded step would copy more keys and values
than `most_cells` blocks: that step runs as it is, without a graph. A step that reads the pool in place copies nothing
(`varlen_attention`); from FULL_WIDTH_ROWS rows on it has one width, because the kernel then divides no sequence.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

LEAST_WIDTH_BLOCKS = 4  # below, padding costs less than another graph
FULL_WIDTH_ROWS = 32


class Bucket(NamedTuple):
    """A padded step of decodes."""

    rows: int
    width_blocks: int
    in_place: bool = False  # the blocks of each row follow one another, and are read where they are

    @property
    def cells(self) -> int:
        """Blocks that such a step names."""
        return self.rows * self.width_blocks


class Buckets:
    """All buckets of an engine."""

    def __init__(self, max_rows: int, max_width_blocks: int, most_cells: int, *, in_place: bool = False) -> None:
        """`max_rows`: requests one step may hold; `max_width_blocks`: blocks of the longest request; `in_place`: there
        are buckets that read the pool in place."""
        self.in_place = in_place
        self.rows = _half_octaves(max_rows)
        self.widths = _octaves(LEAST_WIDTH_BLOCKS, max_width_blocks)
        self._most_cells = most_cells

    def __iter__(self) -> Iterator[Bucket]:
        """Those that copy."""
        for width in self.widths:
            for rows in self.rows:
                if rows * width <= self._most_cells:
                    yield Bucket(rows, width)

    def holding(self, num_rows: int, width_blocks: int, *, contiguous: bool = False) -> Bucket | None:
        """The smallest bucket for `num_rows` decodes of at most `width_blocks` blocks; None if none is large enough.

        `contiguous`: the blocks of every row follow one another.
        """
        row, width = bisect.bisect_left(self.rows, num_rows), bisect.bisect_left(self.widths, width_blocks)
        if row == len(self.rows) or width == len(self.widths):
            return None
        if self.in_place and contiguous:
            return self._in_place(self.rows[row], self.widths[width])
        bucket = Bucket(self.rows[row], self.widths[width])
        return bucket if bucket.cells <= self._most_cells else None

    def _in_place(self, rows: int, width: int) -> Bucket:
        return Bucket(rows, width if rows < FULL_WIDTH_ROWS else self.widths[-1], in_place=True)

    @property
    def largest(self) -> Bucket | None:
        """The copying one that names most blocks; of equal ones that of most rows."""
        return max(self, key=lambda bucket: (bucket.cells, bucket.rows), default=None)

    def to_record(self) -> list[Bucket]:
        """All of them, in the order in which they are recorded at boot: the first matter most.

        The largest, so that the memory which all graphs share has its final size at once. Then one request alone at
        every length: that is who feels launches most (there is nothing else for the device to do meanwhile), and the
        first user of an idle replica is one. Then more and more rows, those that read in place before those that copy.
        """
        largest = [] if self.largest is None else [self.largest]
        copying = sorted(self, key=lambda bucket: (bucket.rows, -bucket.width_blocks))
        ordered = [*largest, *self._all_in_place(), *copying]
        alone = [bucket for bucket in ordered if bucket.rows == 1]
        return list(dict.fromkeys([*ordered[: len(largest)], *alone, *ordered]))

    def _all_in_place(self) -> list[Bucket]:
        if not self.in_place:
            return []
        return list(dict.fromkeys(self._in_place(rows, width) for rows in self.rows for width in reversed(self.widths)))


def _half_octaves(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... below `most`, then `most`."""
    sizes = {size for power in range(most.bit_length()) for size in (1 << power, 3 << power >> 1) if size < most}
    return sorted({*sizes, most})


def _octaves(least: int, most: int) -> list[int]:
    """Powers of two from `least` on, below `most`, then `most`."""
    sizes = [1 << power for power in range(most.bit_length()) if least <= 1 << power < most]
    return [*sizes, most]
