"""Block tables of a model that mixes windows: one per group of layers, in one pool (vLLM's hybrid KV cache manager).

Each group has a `BlockManager`; the first one's tables are the sequence's own, the others' are `Sequence.other_tables`.
A block belongs to one group at a time, and what the window of a group has passed is free for every group.

    tokens          0 ................................................ computed ....... known
    windowed group  . . . . . freed . . . . . . .|<-- window -->|<- lookahead ->|
    full group      |<------------------------------------------------------------------->|

A windowed group holds its window and one step's tokens of a prompt, not the whole prompt: `lookahead_tokens`. A prefix
is found in the cache where it is found in every group; a windowed one needs only what the next token attends to.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from millstream_runtime.engine.scheduling.block_manager import BlockManager, Table
from millstream_runtime.engine.scheduling.sequence import BlockTable, Sequence


class GroupHits(list[int]):
    """Cached blocks of the first group; `others`: as many of each other group."""

    def __init__(self, tables: Seq[list[int]]) -> None:
        super().__init__(tables[0])
        self.others = [*tables[1:]]


class HybridBlockManager(BlockManager):
    """The manager of the first group, and of the others through theirs. Windows ascend, so no table of a sequence is
    shorter than its first one."""

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        num_rows: int,
        *,
        windows: Seq[int | None],
        lookahead_tokens: int,
        enable_prefix_caching: bool = False,
        prefix_root: bytes = b"",
        has_regions: bool = True,
    ) -> None:
        """Create a pool of free blocks for groups of layers.

        Args:
            windows: of each group, ascending; None (to the start) last.
            lookahead_tokens: the most tokens of one sequence that a step computes.
            has_regions: see `BlockManager`.
        """

        def arguments(group: int) -> dict[str, Any]:
            return {
                "enable_prefix_caching": enable_prefix_caching,
                "prefix_root": prefix_root,
                "window_tokens": windows[group],
                "lookahead_tokens": None if windows[group] is None else lookahead_tokens,
                "group": group,
                "num_groups": len(windows),
                "has_regions": has_regions,
            }

        super().__init__(num_blocks, block_size_tokens, num_rows, **arguments(0))
        self.windows = tuple(windows)
        self._others = [
            BlockManager(num_blocks, block_size_tokens, num_rows, pool=self._pool, **arguments(group))
            for group in range(1, len(windows))
        ]

    def most_held_blocks(self, num_tokens: int) -> int:
        return super().most_held_blocks(num_tokens) + sum(one.most_held_blocks(num_tokens) for one in self._others)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        missing = super().missing_blocks(sequence, num_tokens)
        for manager, table in self._tables(sequence):
            missing += manager._missing(table, sequence.num_computed_tokens, num_tokens)
        return missing

    def fresh_blocks(self, sequence: Sequence, hits: Seq[int]) -> int:
        return super().fresh_blocks(sequence, hits) + sum(one.fresh_blocks(sequence, hits) for one in self._others)

    def match_prefix(self, sequence: Sequence, start_block: int = 0) -> GroupHits:
        """The longest run that every group has cached; see `BlockManager.match_prefix`."""
        managers = (self, *self._others)
        hashes = self._matchable_hashes(sequence)
        tables = [manager._match(hashes, start_block) for manager in managers]
        while len(shortest := min(tables, key=len)) < max(map(len, tables)):
            hashes = hashes[: start_block + len(shortest)]
            # A shorter run of a windowed group needs other blocks; one of a full group, or a later piece, does not.
            tables = [
                table[: len(shortest)] if manager.window_tokens is None or start_block else manager._match(hashes)
                for manager, table in zip(managers, tables, strict=True)
            ]
        return GroupHits(tables)

    def held_by(self, sequence: Sequence) -> list[int]:
        return [*sequence.held_blocks, *(block for table in sequence.other_tables for block in table.held_blocks)]

    def held_hits(self, hits: list[int]) -> list[int]:
        held = [*super().held_hits(hits)]
        for manager, blocks in zip(self._others, _others(hits), strict=True):
            held += manager.held_hits(blocks)
        return held

    def row_of_hits(self, hits: Seq[int]) -> int | None:
        """By the group that reads furthest back: its tables are the longest."""
        return self._others[-1].row_of_hits(_others(hits)[-1])

    def region_is_cached(self, row: int) -> bool:
        return self._others[-1].region_is_cached(row)

    def attach_cached(self, sequence: Sequence, blocks: Seq[int]) -> None:
        self._attach(sequence, blocks)
        for (manager, table), own in zip(self._tables(sequence), _others(blocks), strict=True):
            manager._attach(table, own)
        self._count_as_computed(sequence, len(blocks))

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        num_computed = sequence.num_computed_tokens
        needs = [
            (manager, table, manager._missing(table, num_computed, num_tokens))
            for manager, table in self._tables(sequence)
        ]
        own = super().missing_blocks(sequence, num_tokens)
        row = self._prepare(sequence, own + sum(missing for _, _, missing in needs), num_tokens)
        self._extend(sequence, row, own)
        for manager, table, missing in needs:
            manager._extend(table, row, missing)

    def free_outside_window(self, sequence: Sequence) -> None:
        num_computed = sequence.num_computed_tokens
        passes_at = [manager._free_passed(table, num_computed) for manager, table in self._tables(sequence)]
        sequence.window_passes_at_tokens = min(self._free_passed(sequence, num_computed), *passes_at)

    def free(self, sequence: Sequence) -> None:
        super().free(sequence)
        for manager, table in self._tables(sequence):
            manager._free_table(table, sequence)

    def unpublish_uncomputed(self, sequence: Sequence) -> None:
        super().unpublish_uncomputed(sequence)
        for manager, table in self._tables(sequence):
            manager._unpublish_from(table, sequence.num_computed_tokens // self.block_size_tokens)

    def _publish(self, table: Table, hashes: Seq[bytes], num_full_blocks: int) -> None:
        super()._publish(table, hashes, num_full_blocks)
        if isinstance(table, Sequence):
            for manager, other in self._tables(table):
                manager._publish(other, hashes, num_full_blocks)

    def _check_tables(self, sequence: Sequence, counts: Seq[int]) -> None:
        super()._check_tables(sequence, counts)
        for manager, table in self._tables(sequence):
            manager._check_table(table, sequence, counts)

    def _tables(self, sequence: Sequence) -> Iterator[tuple[BlockManager, BlockTable]]:
        """The managers of the other groups with the sequence's tables."""
        if not sequence.other_tables:
            sequence.other_tables = [BlockTable() for _ in self._others]
        return zip(self._others, sequence.other_tables, strict=True)


def _others(hits: Seq[int]) -> list[list[int]]:
    if not isinstance(hits, GroupHits):
        raise TypeError("cached blocks of one group of layers where there are several")
    return hits.others


def make_block_manager(
    windows: Seq[int | None],
    num_blocks: int,
    block_size_tokens: int,
    num_rows: int,
    *,
    lookahead_tokens: int,
    enable_prefix_caching: bool = False,
    prefix_root: bytes = b"",
    has_regions: bool = True,
) -> BlockManager:
    """Return the manager of a pool for groups of layers with these windows; see the two classes."""
    if len(windows) == 1:
        return BlockManager(
            num_blocks,
            block_size_tokens,
            num_rows,
            enable_prefix_caching=enable_prefix_caching,
            window_tokens=windows[0],
            prefix_root=prefix_root,
            has_regions=has_regions,
        )
    return HybridBlockManager(
        num_blocks,
        block_size_tokens,
        num_rows,
        windows=windows,
        lookahead_tokens=lookahead_tokens,
        enable_prefix_caching=enable_prefix_caching,
        prefix_root=prefix_root,
        has_regions=has_regions,
    )
