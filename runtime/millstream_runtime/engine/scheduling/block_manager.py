"""Which KV blocks are free, which sequences hold them, and which block a sequence gets next. No torch: numbers only.

A block is in one of three states; the last two count as free:

    held         by one sequence, or by several that share a prefix (a reference count)
    evictable    by no sequence, but the prefix cache knows its contents; the least recently used is evicted first,
                 and the tail of a sequence before its head, since a tail is of no use without its head
    free         by no sequence, contents unknown; a cached block is evicted only when there are too few of these

The block table of a sequence, left to right in the order of its tokens:

    | outside window | cached prefix |   computed    |  chunk of this step  |    known later    |
    |<- passed ----->|<------------ num_computed_tokens                     |                   |
                     |<- attach_cached ->|<- allocate --------------------->|                   |
    |<- free_outside_window              |<- publish: full blocks with read tokens ->|
                     |<- held_blocks ---------------------------------------------------------->|

Every running sequence has a row, and every row a region: an equal share of the pool, where its blocks follow one
another. A block table may name any block, but while a sequence fits its region it stays there. So attention reads its
keys and values in place, and those of many rows as one strided view, without gathering them first:

    pool    | row 0: a0 a1 a2 .  .  . | row 1: b0 b1 .  .  a4 a3 | row 2 ...
                          region of row 0, then blocks from the far end of another region ^^^^^

Regions are a preference among free blocks, never a reservation: a sequence that outgrows its region takes any free
block, and none evicts a cached block because it lies in its region. A sequence whose region begins with cached blocks
starts behind them instead, in the longest run of free blocks there.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import islice

from millstream_runtime.engine.scheduling.prefix_cache import PrefixCache, extend_hashes
from millstream_runtime.engine.scheduling.rows import longest_run
from millstream_runtime.engine.scheduling.sequence import Sequence


class BlockManager:
    """Owner of the pool's block numbers `0 .. num_blocks - 1`."""

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        num_rows: int,
        *,
        enable_prefix_caching: bool = False,
        window_tokens: int | None = None,
        prefix_root: bytes = b"",
    ) -> None:
        """Create a pool of free blocks.

        Args:
            window_tokens: how far back the layers of this pool attend (None: to the start). A model that mixes
                windowed and full layers needs a manager per group of layers, or None for all.
            prefix_root: where the hashes of cached blocks begin (see `prefix_cache`).
        """
        if num_blocks < 1 or num_rows < 1:
            raise ValueError(f"a pool needs at least one block and one row, not {num_blocks} and {num_rows}")
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.window_tokens = window_tokens
        self.region_blocks = num_blocks // num_rows
        self._num_region_blocks = self.region_blocks * num_rows
        # An ordered set: any member is removed in O(1), and popitem() takes the newest. Blocks outside all regions
        # and the far ends of regions are put in last, so they are taken first; a freed sequence's tail before its head.
        self._free = dict.fromkeys(
            sorted(
                range(num_blocks), key=lambda b: b % self.region_blocks if b < self._num_region_blocks else num_blocks
            )
        )
        self._evictable: dict[int, None] = {}  # the same, oldest first
        self._num_holders = [0] * num_blocks
        self._cache = PrefixCache(prefix_root) if enable_prefix_caching else None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free) + len(self._evictable)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` take."""
        return -(-num_tokens // self.block_size_tokens)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `sequence` lacks to hold its first `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_table))

    # Queries, for the scheduler's plan ---------------------------------------------------------------------------

    def match_prefix(self, sequence: Sequence, start_block: int = 0) -> list[int]:
        """Return the longest run of cached blocks that hold the sequence's tokens from `start_block` on.

        At least one known token stays uncomputed: sampling the next token needs its logits. Where the layers have a
        window, the first `num_passed` of a run from 0 need not be cached: those entries stand for no block.
        """
        blocks: list[int] = []
        if self._cache is None or not sequence.uses_prefix_cache:
            return blocks
        hashes = extend_hashes(sequence, self.block_size_tokens, self._cache.root)
        limit = (len(sequence.token_ids) - 1) // self.block_size_tokens
        if self.window_tokens is not None and start_block == 0:
            return self._match_window(self._cache, hashes[:limit])
        for index in range(start_block, limit):
            block = self._cache.find(hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_passed(self, num_tokens: int) -> int:
        """How many first blocks of a sequence with `num_tokens` computed tokens no later token attends to.

        The next token, at position `num_tokens`, attends to itself and `window_tokens - 1` before it.
        """
        if self.window_tokens is None:
            return 0
        # The last two computed tokens may be of steps that are not read yet. If these gave NaN, the blocks must still
        # be held by this sequence to be zeroed.
        first_seen = num_tokens - max(self.window_tokens, 3) + 1
        return max(0, first_seen) // self.block_size_tokens

    def is_held(self, block: int) -> bool:
        """Whether any sequence holds the block."""
        return self._num_holders[block] > 0

    def freed_by(self, sequence: Sequence, released: Mapping[int, int]) -> int:
        """Return how many blocks become free if `sequence` is preempted.

        `released`: by block, how many holders are preempted before it.
        """
        return sum(self._num_holders[block] == released.get(block, 0) + 1 for block in sequence.held_blocks)

    def row_of_region(self, block: int) -> int | None:
        """The row whose region has `block`; None where none has."""
        return block // self.region_blocks if block < self._num_region_blocks else None

    def region_is_cached(self, row: int) -> bool:
        """Whether the first block of the row's region holds a cached prefix."""
        return self._cache is not None and row * self.region_blocks in self._cache

    # Changes -----------------------------------------------------------------------------------------------------

    def attach_cached(self, sequence: Sequence, blocks: Seq[int]) -> None:
        """Append blocks found by `match_prefix` to the table; their tokens count as computed."""
        num_passed = 0 if sequence.block_table else self.num_passed(len(blocks) * self.block_size_tokens)
        for index, block in enumerate(blocks):
            if index >= num_passed:
                self._evictable.pop(block, None)
                self._num_holders[block] += 1
            self._append(sequence, block)
        sequence.num_passed_blocks += num_passed
        sequence.num_computed_tokens += len(blocks) * self.block_size_tokens
        sequence.num_published_blocks = len(sequence.block_table)

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Extend the block table to hold `num_tokens`.

        Raises:
            ValueError: the sequence has no row, or there are not enough free blocks.
        """
        if sequence.row is None:
            raise ValueError(f"request {sequence.request.request_id} has no row; admit it before it gets blocks")
        missing = self.missing_blocks(sequence, num_tokens)
        if missing > self.num_free_blocks:
            raise ValueError(f"{num_tokens} tokens need more blocks than the {self.num_free_blocks} free ones")
        self._evict(missing - len(self._free))
        for _ in range(missing):
            block = self._take(self._next_place(sequence, sequence.row))
            self._num_holders[block] += 1
            self._append(sequence, block)

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
        hashes = extend_hashes(sequence, self.block_size_tokens, self._cache.root)
        for index in range(max(sequence.num_published_blocks, sequence.num_passed_blocks), num_full_blocks):
            self._cache.insert(hashes[index], sequence.block_table[index])
        sequence.num_published_blocks = num_full_blocks

    def free_outside_window(self, sequence: Sequence) -> None:
        """Free blocks that no later token of the sequence attends to. Their numbers stay in the table, masked."""
        num_passed = self.num_passed(sequence.num_computed_tokens)
        if num_passed > sequence.num_passed_blocks:
            passed = sequence.block_table[sequence.num_passed_blocks : num_passed]
            sequence.num_passed_blocks = num_passed
            self._release(passed)

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, except those that others share. Its prefix is now the most recently used."""
        self._release(sequence.held_blocks)
        self._touch(sequence)
        sequence.block_table.clear()
        sequence.blocks_are_contiguous = True
        sequence.num_passed_blocks = sequence.num_published_blocks = 0

    def unpublish(self, sequence: Sequence) -> list[int]:
        """Drop a sequence's blocks from the prefix cache; return those that no other sequence holds."""
        if self._cache is not None:
            for block in sequence.held_blocks:
                self._cache.remove(block)
        return [block for block in sequence.held_blocks if self._num_holders[block] == 1]

    def unpublish_uncomputed(self, sequence: Sequence) -> None:
        """Drop blocks from the prefix cache that were published for a step which was not computed."""
        first = sequence.num_computed_tokens // self.block_size_tokens
        if self._cache is not None:
            for block in sequence.block_table[max(first, sequence.num_passed_blocks) : sequence.num_published_blocks]:
                self._cache.remove(block)
        sequence.num_published_blocks = min(sequence.num_published_blocks, first)

    def check_integrity(self, holders: Seq[Sequence]) -> None:
        """Check that every block is free or held by as many as its count says, and that no shared block is written.

        Raises:
            RuntimeError: names the first block that is leaked, miscounted, held and free, or about to be written.
        """
        counts = [0] * self.num_blocks
        for sequence in holders:
            for block in sequence.held_blocks:
                counts[block] += 1
        for block, count in enumerate(counts):
            self._check_block(block, count)
        for sequence in holders:
            next_block = sequence.num_computed_tokens // self.block_size_tokens
            for block in sequence.block_table[max(next_block, sequence.num_passed_blocks) :]:
                if counts[block] > 1:
                    raise RuntimeError(
                        f"KV block {block} is shared, but request {sequence.request.request_id} would write to it."
                    )

    # Helpers -------------------------------------------------------------------------------------------------------

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

    def _next_place(self, sequence: Sequence, row: int) -> int | None:
        """The block that keeps the sequence contiguous within a region; None where any is as good as another."""
        if sequence.block_table:
            after = sequence.block_table[-1] + 1
            return after if sequence.blocks_are_contiguous and self._is_within_region(after) else None
        start = row * self.region_blocks
        return start if start in self._free else longest_run(self._free, start, start + self.region_blocks)

    def _is_within_region(self, block: int) -> bool:
        """Whether `block` lies in a region and is not its first."""
        return block < self._num_region_blocks and block % self.region_blocks != 0

    def _take(self, preferred: int | None) -> int:
        """Take `preferred` if it is free; else another free block."""
        if preferred not in self._free:
            return self._free.popitem()[0]
        del self._free[preferred]
        return preferred

    def _evict(self, count: int) -> None:
        """Make the `count` least recently used cached blocks free ones."""
        for block in list(islice(self._evictable, max(0, count))):
            del self._evictable[block]
            if self._cache is not None:
                self._cache.remove(block)
            self._free[block] = None

    def _touch(self, sequence: Sequence) -> None:
        """Make what the cache knows of a released sequence the most recently used, its tail before its head.

        Some of it may be blocks of others that were computed at the same time: the cache keeps one block per hash. If
        such a block grew older than the sequence's later ones, these would outlive the prefix that they need.
        """
        if self._cache is None or not sequence.uses_prefix_cache:
            return
        hashes = sequence.block_hashes[sequence.num_passed_blocks : sequence.num_published_blocks]
        for block_hash in reversed(hashes):
            block = self._cache.find(block_hash)
            if block in self._evictable:
                del self._evictable[block]
                self._evictable[block] = None

    def _append(self, sequence: Sequence, block: int) -> None:
        table = sequence.block_table
        if table and block != table[-1] + 1:
            sequence.blocks_are_contiguous = False
        table.append(block)

    def _release(self, blocks: Seq[int]) -> None:
        idle: list[int] = []
        for block in blocks:
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                idle.append(block)
        cache = self._cache if self._cache is not None else ()
        self._free.update((block, None) for block in idle if block not in cache)
        self._evictable.update((block, None) for block in reversed(idle) if block in cache)

    def _check_block(self, block: int, count: int) -> None:
        lists = (block in self._free) + (block in self._evictable)
        if count and lists:
            raise RuntimeError(f"KV block {block} is held by {count} requests and on a free list.")
        if not count and lists != 1:
            raise RuntimeError(f"KV block {block} is leaked: no request holds it and it is on {lists} free lists.")
        if count != self._num_holders[block]:
            raise RuntimeError(f"KV block {block} is held by {count} requests, but counted {self._num_holders[block]}.")
        is_cached = self._cache is not None and block in self._cache
        if block in self._evictable and not is_cached:
            raise RuntimeError(f"KV block {block} is kept for the prefix cache, which does not know it.")
        if block in self._free and is_cached:
            raise RuntimeError(f"KV block {block} is free, and the prefix cache would still hand it out.")
