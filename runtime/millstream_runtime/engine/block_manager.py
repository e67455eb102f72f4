"""Which KV blocks are free, and which one a sequence gets next. No torch: numbers only.

Every running sequence has a row, and every row a home: an equal share of the pool, where its blocks follow one
another. A block table may name any block, but while a sequence fits its home it stays there, so attention reads
its keys and values where they lie, and those of many rows as one strided view, without gathering them first:

    pool    | row 0: a0 a1 a2 .  .  . | row 1: b0 b1 .  .  a4 a3 | row 2 ...
                            home of row 0, then borrowed from the far end of another home ^^^^^

Homes are a preference, never a reservation: a sequence that outgrows its home borrows whatever is free.
"""

from __future__ import annotations

from millstream_runtime.engine.sequence import Sequence


class BlockManager:
    """Owner of the pool's block numbers `0 .. num_blocks - 1`."""

    def __init__(self, num_blocks: int, block_size_tokens: int, num_rows: int) -> None:
        if num_blocks < 1 or num_rows < 1:
            raise ValueError(f"a pool needs at least one block and one row, not {num_blocks} and {num_rows}")
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.home_blocks = num_blocks // num_rows
        # An ordered set: any member is removed in O(1), and popitem() takes the newest. Blocks without a home and the
        # far ends of homes are put in last, so they are lent first; a freed sequence's tail goes before its head.
        homeless = self.home_blocks * num_rows
        self._free = dict.fromkeys(
            sorted(range(num_blocks), key=lambda block: block % self.home_blocks if block < homeless else num_blocks)
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` take."""
        return -(-num_tokens // self.block_size_tokens)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `sequence` lacks to hold its first `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_table))

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `grow` would succeed."""
        return self.missing_blocks(sequence, num_tokens) <= len(self._free)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Extend the block table to hold `num_tokens`. Ask `can_grow` first; the sequence has a row."""
        if sequence.row is None:
            raise ValueError(f"request {sequence.request.request_id} has no row; admit it before it gets blocks")
        if not self.can_grow(sequence, num_tokens):
            raise ValueError(f"{num_tokens} tokens need more blocks than the {len(self._free)} free ones")
        home = sequence.row * self.home_blocks
        table = sequence.block_table
        for _ in range(self.missing_blocks(sequence, num_tokens)):
            block = home + len(table)
            if len(table) < self.home_blocks and block in self._free:
                del self._free[block]
            else:
                block, _ = self._free.popitem()
            if table and block != table[-1] + 1:
                sequence.blocks_are_contiguous = False
            table.append(block)

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence; its tail will be lent before its head."""
        for block in sequence.block_table:
            self._free[block] = None
        sequence.block_table.clear()
        sequence.blocks_are_contiguous = True

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Every block is free or in exactly one of the holders' tables.

        Raises:
            RuntimeError: naming the first block that is leaked, held twice, or held and free.
        """
        owner: dict[int, str] = dict.fromkeys(self._free, "the free list")
        for sequence in holders:
            name = f"request {sequence.request.request_id}"
            for block in sequence.block_table:
                if block in owner:
                    raise RuntimeError(f"KV block {block} is held by {name} and by {owner[block]}.")
                owner[block] = name
        if len(owner) != self.num_blocks:
            leaked = min(set(range(self.num_blocks)) - owner.keys())
            raise RuntimeError(
                f"{self.num_blocks - len(owner)} KV blocks are leaked: no request holds them (first: {leaked})."
            )
