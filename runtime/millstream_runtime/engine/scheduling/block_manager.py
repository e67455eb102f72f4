"""Which KV blocks are free, which sequences hold them, and which block a sequence gets next. No torch: numbers only.

A block is held, evictable or free (see `block_pool`). Of what is evictable the tail of a sequence goes before its head,
since a tail is of no use without its head.

The block table of a sequence, left to right in the order of its tokens:

    | outside window | cached prefix |   computed    |  chunk of this step  |    known later    |
    |<- passed ----->|<------------ num_computed_tokens                     |                   |
                     |<- attach_cached ->|<- allocate --------------------->|                   |
    |<- free_outside_window              |<- publish: full blocks with read tokens ->|
                     |<- held_blocks ---------------------------------------------------------->|

Every running sequence has a row. Where torch attends on a GPU, every row has a region: an equal share of the pool, in
which its blocks follow one another. A block table may name any block, but while a sequence fits its region it stays
there. So FlashAttention reads its keys and values in place, without gathering them first:

    pool    | row 0: a0 a1 a2 .  .  . | row 1: b0 b1 .  .  a4 a3 | row 2 ...
                          region of row 0, then blocks from the far end of another region ^^^^^

Regions are a preference among free blocks, never a reservation: a sequence that outgrows its region takes any free
block, and none evicts a cached block because it lies in its region. A sequence whose region begins with cached blocks
starts behind them instead, in the longest run of free blocks there.

On a CPU, and where our kernels attend, one place is as good as another, and there are no regions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.engine.scheduling.block_pool import BlockPool
from millstream_runtime.engine.scheduling.prefix_cache import PrefixCache, extend_hashes
from millstream_runtime.engine.scheduling.rows import longest_run
from millstream_runtime.engine.scheduling.sequence import BlockTable, Sequence
from millstream_runtime.kv_layout import LEAST_WINDOW_TOKENS, held_blocks_limit

Table = Sequence | BlockTable  # a sequence is the block table of its first group of layers


class BlockManager:
    """The block tables of one group of layers, usually of all: the only one of its pool, or one of several."""

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        num_rows: int,
        *,
        enable_prefix_caching: bool = False,
        window_tokens: int | None = None,
        prefix_root: bytes = b"",
        pool: BlockPool | None = None,
        group: int = 0,
        num_groups: int = 1,
        lookahead_tokens: int | None = None,
        has_regions: bool = True,
    ) -> None:
        """Create a manager of free blocks.

        Args:
            window_tokens: how far back the layers of this group attend (None: to the start).
            prefix_root: where the hashes of cached blocks begin (see `prefix_cache`).
            pool: shared with the managers of other groups; by default its own.
            group: which of `num_groups` this is.
            lookahead_tokens: beyond the window and this many tokens a sequence gets no blocks before it needs them.
            has_regions: whether rows have regions, where the pool is its own.
        """
        if num_blocks < 1 or num_rows < 1:
            raise ValueError(f"a pool needs at least one block and one row, not {num_blocks} and {num_rows}")
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.window_tokens = window_tokens
        self.windows: tuple[int | None, ...] = (window_tokens,)  # of all groups
        self._pool = pool if pool is not None else BlockPool(num_blocks, num_rows * num_groups * has_regions)
        self._group, self._num_groups = group, num_groups
        self._lookahead_tokens = lookahead_tokens
        self._cache = PrefixCache(prefix_root) if enable_prefix_caching else None
        if self._cache is not None:
            self._pool.caches.append(self._cache)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free_blocks

    @property
    def has_prefix_cache(self) -> bool:
        """Whether full blocks are found again after their sequence has given them up."""
        return self._cache is not None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` take in a table."""
        return -(-num_tokens // self.block_size_tokens)

    def most_held_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most at any time."""
        return held_blocks_limit(num_tokens, self.block_size_tokens, self.window_tokens, self._lookahead_tokens)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `sequence` lacks to hold its first `num_tokens` tokens, or as many as it gets now."""
        return self._missing(sequence, sequence.num_computed_tokens, num_tokens)

    def fresh_blocks(self, sequence: Sequence, hits: Seq[int]) -> int:
        """Blocks that a waiting sequence with these cached ones lacks to hold its known tokens."""
        num_computed = len(hits) * self.block_size_tokens
        return self.blocks_for(self._holdable(num_computed, len(sequence.token_ids))) - len(hits)

    # Queries, for the scheduler's plan ---------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence, start_block: int = 0) -> list[int]:
        """Return the longest run of cached blocks that hold the sequence's tokens from `start_block` on.

        At least one known token stays uncomputed: sampling the next token needs its logits. Where the layers have a
        window, the first `num_passed` of a run from 0 need not be cached: those entries stand for no block.
        """
        return self._match(self._matchable_hashes(sequence), start_block)

    def num_passed(self, num_tokens: int) -> int:
        """How many first blocks of a sequence with `num_tokens` computed tokens no later token attends to.

        The next token, at position `num_tokens`, attends to itself and `window_tokens - 1` before it.
        """
        if self.window_tokens is None:
            return 0
        first_seen = num_tokens - max(self.window_tokens, LEAST_WINDOW_TOKENS) + 1
        return max(0, first_seen) // self.block_size_tokens

    def is_held(self, block: int, num_released: int = 0) -> bool:
        """Whether any sequence holds the block, after `num_released` holders are preempted."""
        return self._pool.num_holders[block] > num_released

    def held_by(self, sequence: Sequence) -> list[int]:
        """Blocks that a sequence holds."""
        return sequence.held_blocks

    def held_hits(self, hits: list[int]) -> list[int]:
        """Those of the blocks of a match that the sequence would hold."""
        return hits[self.num_passed(len(hits) * self.block_size_tokens) :]

    def freed_by(self, sequence: Sequence, released: Mapping[int, int]) -> int:
        """Return how many blocks become free if `sequence` is preempted.

        `released`: by block, how many holders are preempted before it.
        """
        holders = self._pool.num_holders
        return sum(holders[block] == released.get(block, 0) + 1 for block in self.held_by(sequence))

    def row_of_hits(self, hits: Seq[int]) -> int | None:
        """The row whose region has the last of these blocks; None where none has, or there are no regions."""
        if not hits or hits[-1] >= self._pool.num_region_blocks:
            return None
        return hits[-1] // self._pool.region_blocks // self._num_groups

    def region_is_cached(self, row: int) -> bool:
        """Whether the first block of the row's region holds a cached prefix."""
        return self._pool.has_regions and self._cache is not None and self._region_start(row) in self._cache

    # Changes -----------------------------------------------------------------------------------------------------

    def attach_cached(self, sequence: Sequence, blocks: Seq[int]) -> None:
        """Append blocks found by `match_prefix` to the table; their tokens count as computed."""
        self._attach(sequence, blocks)
        self._count_as_computed(sequence, len(blocks))

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Extend the block table to hold `num_tokens`, or as many as the sequence gets now.

        Raises:
            ValueError: the sequence has no row, or there are not enough free blocks.
        """
        missing = self.missing_blocks(sequence, num_tokens)
        row = self._prepare(sequence, missing, num_tokens)
        self._extend(sequence, row, missing)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the full blocks of the first `num_tokens` tokens to the prefix cache.

        They are computed, or will be in the step that is being planned: a layer writes all keys and values of a step
        before it reads any, so another sequence may share them within the same step. A block with a token that is not
        read yet is published later: its hash is not known, and the token may never be accepted.

        Blocks that a sliding window has passed are left out: the sequence does not hold them any more.
        """
        num_full_blocks = min(num_tokens, sequence.num_read_tokens) // self.block_size_tokens
        if self._cache is None or sequence.num_published_blocks >= num_full_blocks or not sequence.uses_prefix_cache:
            return
        self._publish(sequence, extend_hashes(sequence, self.block_size_tokens, self._cache.root), num_full_blocks)

    def free_outside_window(self, sequence: Sequence) -> None:
        """Free blocks that no later token of the sequence attends to. Their numbers stay in the table, masked."""
        sequence.window_passes_at_tokens = self._free_passed(sequence, sequence.num_computed_tokens)

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, except those that others share. Its prefix is now the most recently used."""
        self._free_table(sequence, sequence)
        sequence.window_passes_at_tokens = 0
        sequence.num_releases += 1

    def unpublish(self, sequence: Sequence) -> list[int]:
        """Drop a sequence's blocks from the prefix cache; return those that no other sequence holds."""
        held = self.held_by(sequence)
        for block in held:
            self._pool.forget(block)
        return [block for block in held if self._pool.num_holders[block] == 1]

    def unpublish_uncomputed(self, sequence: Sequence) -> None:
        """Drop blocks from the prefix cache that were published for a step which was not computed."""
        self._unpublish_from(sequence, sequence.num_computed_tokens // self.block_size_tokens)

    def check_integrity(self, holders: Seq[Sequence]) -> None:
        """Check that every block is free or held by as many as its count says, that no shared block is written, and
        that none is kept which a window has passed.

        Raises:
            RuntimeError: names the first block that is leaked, miscounted, held and free, kept too long, or about to be
                written.
        """
        counts = [0] * self.num_blocks
        for sequence in holders:
            for block in self.held_by(sequence):
                counts[block] += 1
        self._pool.check(counts)
        for sequence in holders:
            self._check_tables(sequence, counts)

    # Helpers, of one table -----------------------------------------------------------------------------------------

    def _holdable(self, num_computed: int, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens a sequence has places for, at most."""
        if self._lookahead_tokens is None:
            return num_tokens
        # Whole blocks, so that a prefix found after room was set aside takes no more: its window and what comes behind
        # are then no more blocks than both together.
        lookahead_tokens = self.blocks_for(self._lookahead_tokens) * self.block_size_tokens
        return min(num_tokens, max(num_computed, self.window_tokens or 0) + lookahead_tokens)

    def _missing(self, table: Table, num_computed: int, num_tokens: int) -> int:
        return max(0, self.blocks_for(self._holdable(num_computed, num_tokens)) - len(table.block_table))

    def _matchable_hashes(self, sequence: Sequence) -> Seq[bytes]:
        if self._cache is None or not sequence.uses_prefix_cache:
            return ()
        hashes = extend_hashes(sequence, self.block_size_tokens, self._cache.root)
        return hashes[: (len(sequence.token_ids) - 1) // self.block_size_tokens]

    def _match(self, hashes: Seq[bytes], start_block: int = 0) -> list[int]:
        """`match_prefix` by the hashes of the blocks that may match."""
        blocks: list[int] = []
        if self._cache is None:
            return blocks
        if self.window_tokens is not None and start_block == 0:
            return self._match_window(self._cache, hashes)
        for index in range(start_block, len(hashes)):
            block = self._cache.find(hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _match_window(self, cache: PrefixCache, hashes: Seq[bytes]) -> list[int]:
        """The longest prefix of which all blocks within the window are cached, found from its end (as vLLM does).

        Entries before the window are numbers that keep the table contiguous where there are such.
        """
        run: list[int] = []  # cached blocks up to `end`, the last one first
        end = len(hashes)
        for index in reversed(range(len(hashes))):
            block = cache.find(hashes[index])
            if block is None:
                run, end = [], index
                continue
            run.append(block)
            if index <= self.num_passed(end * self.block_size_tokens):
                break
        if not run:
            return []
        first, num_before = run[-1], end - len(run)
        before = range(first - num_before, first) if first >= num_before else [first] * num_before
        return [*before, *reversed(run)]

    def _attach(self, table: Table, blocks: Seq[int]) -> None:
        num_passed = 0 if table.block_table else self.num_passed(len(blocks) * self.block_size_tokens)
        for index, block in enumerate(blocks):
            if index >= num_passed:
                self._pool.hold_cached(block)
            _append(table, block)
        table.num_passed_blocks += num_passed
        table.num_published_blocks = len(table.block_table)

    def _count_as_computed(self, sequence: Sequence, num_blocks: int) -> None:
        sequence.num_computed_tokens += num_blocks * self.block_size_tokens
        self.free_outside_window(sequence)  # what a longer prefix, found later, leaves behind

    def _prepare(self, sequence: Sequence, missing: int, num_tokens: int) -> int:
        """Make `missing` blocks free; return the sequence's row."""
        if sequence.row is None:
            raise ValueError(f"request {sequence.request.request_id} has no row; admit it before it gets blocks")
        if missing > self.num_free_blocks:
            raise ValueError(f"{num_tokens} tokens need more blocks than the {self.num_free_blocks} free ones")
        self._pool.evict(missing - len(self._pool.free))
        return sequence.row

    def _extend(self, table: Table, row: int, count: int) -> None:
        for _ in range(count):
            _append(table, self._pool.take(self._next_place(table, row)))

    def _next_place(self, table: Table, row: int) -> int | None:
        """The block that keeps the table contiguous within a region; None where any is as good as another."""
        if not self._pool.has_regions:
            return None
        if table.block_table:
            after = table.block_table[-1] + 1
            return after if table.blocks_are_contiguous and self._pool.is_within_region(after) else None
        start = self._region_start(row)
        return (
            start
            if start in self._pool.free
            else longest_run(self._pool.free, start, self._region_start(row) + self._pool.region_blocks)
        )

    def _region_start(self, row: int) -> int:
        return (row * self._num_groups + self._group) * self._pool.region_blocks

    def _publish(self, table: Table, hashes: Seq[bytes], num_full_blocks: int) -> None:
        if self._cache is not None:
            for index in range(max(table.num_published_blocks, table.num_passed_blocks), num_full_blocks):
                self._cache.insert(hashes[index], table.block_table[index])
        table.num_published_blocks = num_full_blocks

    def _unpublish_from(self, table: Table, first_block: int) -> None:
        for block in table.block_table[max(first_block, table.num_passed_blocks) : table.num_published_blocks]:
            self._pool.forget(block)
        table.num_published_blocks = min(table.num_published_blocks, first_block)

    def _free_passed(self, table: Table, num_computed: int) -> int:
        """Free what the window has passed; return the number of computed tokens at which it passes another block."""
        if self.window_tokens is None:
            return sys.maxsize
        num_passed = self.num_passed(num_computed)
        if num_passed > table.num_passed_blocks:
            passed = table.block_table[table.num_passed_blocks : num_passed]
            table.num_passed_blocks = num_passed
            self._pool.release(passed, self._cache)
        return (num_passed + 1) * self.block_size_tokens + max(self.window_tokens, LEAST_WINDOW_TOKENS) - 1

    def _free_table(self, table: Table, sequence: Sequence) -> None:
        self._pool.release(table.held_blocks, self._cache)
        self._touch(table, sequence)
        table.block_table.clear()
        table.blocks_are_contiguous = True
        table.num_passed_blocks = table.num_published_blocks = 0

    def _touch(self, table: Table, sequence: Sequence) -> None:
        """Make what the cache knows of a released sequence the most recently used, its tail before its head.

        Some of it may be blocks of others that were computed at the same time: the cache keeps one block per hash. If
        such a block grew older than the sequence's later ones, these would outlive the prefix that they need.
        """
        if self._cache is None or not sequence.uses_prefix_cache:
            return
        evictable = self._pool.evictable
        for block_hash in reversed(sequence.block_hashes[table.num_passed_blocks : table.num_published_blocks]):
            block = self._cache.find(block_hash)
            if block in evictable:
                del evictable[block]
                evictable[block] = None

    def _check_tables(self, sequence: Sequence, counts: Seq[int]) -> None:
        self._check_table(sequence, sequence, counts)

    def _check_table(self, table: Table, sequence: Sequence, counts: Seq[int]) -> None:
        request_id = sequence.request.request_id
        if table.num_passed_blocks < min(self.num_passed(sequence.num_computed_tokens), len(table.block_table)):
            block = table.block_table[table.num_passed_blocks]
            raise RuntimeError(f"KV block {block} is kept by request {request_id}, whose window has passed it.")
        next_block = sequence.num_computed_tokens // self.block_size_tokens
        for block in table.block_table[max(next_block, table.num_passed_blocks) :]:
            if counts[block] > 1:
                raise RuntimeError(f"KV block {block} is shared, but request {request_id} would write to it.")


def _append(table: Table, block: int) -> None:
    blocks = table.block_table
    if blocks and block != blocks[-1] + 1:
        table.blocks_are_contiguous = False
    blocks.append(block)
