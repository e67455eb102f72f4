"""Block tables that stay on the device: a row for each row of the batch, of which a step writes what has changed.

    row 0     | 7 | 3 | 9 | 0 | 0 ..     a block is added once in 16 steps; 0 stands for the zero block
    row 1     | 0 | 0 | 5 | 6 | 0 ..     what a window has passed is the zero block again
    ...
    padding   | 0 | 0 | 0 | 0 | 0 ..     of rows that are only padding

A table of a request only grows until its blocks are given up (`ChunkInput.owner`), so the host remembers of each row
whose table it has and which columns of it, and sends the difference: of 256 requests of 131,072 tokens 16 numbers per
step instead of 2 million. A row that another request gets is written anew.

Columns that no token of the request is in, and those that its window has passed, always name the zero block: what lies
elsewhere may be another's (`static_decode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.engine.execution.step_input import ChunkInput
from millstream_runtime.engine.transfer import on_device


@dataclass(frozen=True, slots=True)
class _Row:
    """What a row on the device has: columns `first .. stop - 1` of a table; the zero block in all others."""

    owner: tuple[int, int] | None = None
    first: int = 0
    stop: int = 0


class DeviceTables:
    """Of one group of layers."""

    def __init__(self, num_rows: int, width_blocks: int, zero_block: int, device: torch.device) -> None:
        shape = num_rows + 1, width_blocks
        self._tables = torch.full(shape, zero_block, dtype=torch.int32, device=device)
        self._rows = [_Row()] * num_rows
        self._zero_block = zero_block

    @property
    def padding_row(self) -> int:
        """A row that names the zero block alone."""
        return len(self._rows)

    def view(self, width_blocks: int) -> Tensor:
        """`[num_rows + 1, width_blocks]` int32, the same memory at each call."""
        return self._tables[:, :width_blocks]

    def update(self, rows: Sequence[int], chunks: Sequence[ChunkInput], seen: Sequence[range]) -> int:
        """Bring these rows up to date with the tables of a step's chunks. Enqueues at most one copy.

        Args:
            rows: of each chunk.
            seen: columns that the layers of this group read, of each chunk's table.

        Returns: how many numbers were sent.
        """
        places: list[int] = []
        blocks: list[int] = []
        found: dict[int, _Row] = {}
        width = self._tables.shape[1]
        for row, chunk, columns in zip(rows, chunks, seen, strict=True):
            now = _Row(chunk.owner, columns.start, columns.stop)
            before = self._rows[row]
            if now == before and now.owner is not None:
                continue
            table = chunk.block_table
            for columns, is_seen in _changes(before, now):
                places += range(row * width + columns.start, row * width + columns.stop)
                blocks += table[columns.start : columns.stop] if is_seen else [self._zero_block] * len(columns)
            found[row] = now
        if places:
            numbers = on_device([places, blocks], self._tables.device)
            self._tables.view(-1).index_copy_(0, numbers[0], numbers[1].int())
        for row, now in found.items():  # only what was sent counts: there may have been no memory for it
            self._rows[row] = now
        return len(places)


def _changes(before: _Row, now: _Row) -> list[tuple[range, bool]]:
    """Columns that differ, and whether they name blocks now. Ranges may be empty."""
    has_grown = now.owner is not None and now.owner == before.owner and now.first >= before.first
    first_new = max(now.first, before.stop) if has_grown else now.first
    return [
        (range(before.first, min(before.stop, now.first)), False),
        (range(max(before.first, now.stop), before.stop), False),
        (range(first_new, now.stop), True),
    ]
