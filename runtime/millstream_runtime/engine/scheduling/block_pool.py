"""The blocks of a pool: which are free, evictable or held, whoever holds them. No torch: numbers only.

held         by one block table, or by several that share a prefix (a reference count)
evictable    by none, but a prefix cache knows its contents; the least recently used is evicted first
free         by none, contents unknown; a cached block is evicted only when there are too few of these
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import islice

from millstream_runtime.engine.scheduling.prefix_cache import PrefixCache


class BlockPool:
    """Owner of the block numbers `0 .. num_blocks - 1`. Its members belong to the block managers that share it."""

    def __init__(self, num_blocks: int, num_regions: int) -> None:
        """Create free blocks.

        Args:
            num_regions: into how many equal regions they are divided; 0: none. See `block_manager`.
        """
        self.num_blocks = num_blocks
        self.has_regions = num_regions > 0
        self.region_blocks = num_blocks // num_regions if num_regions else 0
        self.num_region_blocks = self.region_blocks * num_regions
        # An ordered set: any member is removed in O(1), and popitem() takes the newest. Blocks outside all regions
        # and the far ends of regions are put in last, so they are taken first; a freed sequence's tail before its head.
        # Without regions the first are.
        ordered: Iterable[int] = (
            sorted(
                range(num_blocks), key=lambda b: b % self.region_blocks if b < self.num_region_blocks else num_blocks
            )
            if self.has_regions
            else reversed(range(num_blocks))
        )
        self.free = dict.fromkeys(ordered)
        self.evictable: dict[int, None] = {}  # the same, oldest first
        self.num_holders = [0] * num_blocks
        self.caches: list[PrefixCache] = []  # of all managers

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self.free) + len(self.evictable)

    def is_within_region(self, block: int) -> bool:
        """Whether `block` lies in a region and is not its first."""
        return block < self.num_region_blocks and block % self.region_blocks != 0

    def take(self, preferred: int | None) -> int:
        """Take `preferred` if it is free; else another free block. There is one: see `evict`."""
        if preferred not in self.free:
            block = self.free.popitem()[0]
        else:
            del self.free[preferred]
            block = preferred
        self.num_holders[block] += 1
        return block

    def hold_cached(self, block: int) -> None:
        """Add a holder to a block that a prefix cache knows."""
        self.evictable.pop(block, None)
        self.num_holders[block] += 1

    def evict(self, count: int) -> None:
        """Make the `count` least recently used cached blocks free ones."""
        for block in list(islice(self.evictable, max(0, count))):
            del self.evictable[block]
            self.forget(block)
            self.free[block] = None

    def forget(self, block: int) -> None:
        """Drop a block from the prefix cache that knows it, if any."""
        for cache in self.caches:
            cache.remove(block)

    def release(self, blocks: Seq[int], cache: PrefixCache | None) -> None:
        """Take a holder from each block. `cache`: of the manager that they belong to."""
        idle: list[int] = []
        for block in blocks:
            self.num_holders[block] -= 1
            if not self.num_holders[block]:
                idle.append(block)
        cached = cache if cache is not None else ()
        self.free.update((block, None) for block in idle if block not in cached)
        self.evictable.update((block, None) for block in reversed(idle) if block in cached)

    def check(self, counts: Seq[int]) -> None:
        """Check every block against the number of its holders.

        Raises:
            RuntimeError: names the first block that is leaked, miscounted, held and free, or free and cached.
        """
        for block, count in enumerate(counts):
            self._check_block(block, count)

    def _check_block(self, block: int, count: int) -> None:
        lists = (block in self.free) + (block in self.evictable)
        if count and lists:
            raise RuntimeError(f"KV block {block} is held by {count} requests and on a free list.")
        if not count and lists != 1:
            raise RuntimeError(f"KV block {block} is leaked: no request holds it and it is on {lists} free lists.")
        if count != self.num_holders[block]:
            raise RuntimeError(f"KV block {block} is held by {count} requests, but counted {self.num_holders[block]}.")
        num_caches = sum(block in cache for cache in self.caches)
        if num_caches > 1:
            raise RuntimeError(f"KV block {block} is in the prefix caches of {num_caches} groups of layers.")
        if block in self.evictable and not num_caches:
            raise RuntimeError(f"KV block {block} is kept for the prefix cache, which does not know it.")
        if block in self.free and num_caches:
            raise RuntimeError(f"KV block {block} is free, and the prefix cache would still hand it out.")
