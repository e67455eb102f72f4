"""Prefix cache: which pool block holds which tokens, found by a chain of hashes.

    hash 0 = SHA-256(first parent + tokens 0 .. 15)      a block's hash stands for all tokens up to its end,
    hash 1 = SHA-256(hash 0       + tokens 16 .. 31)     so equal hashes mean equal prefixes

SHA-256 and not Python's `hash`: a client that could make two prefixes collide would be answered from another's
context. The salt separates tenants: without it the time to the first token reveals whether another client has sent a
prefix before (CVE-2025-46570). The design is vLLM V1's. The first parent is a hash of the salt and of the cache's root,
which stands for what keys depend on besides tokens: checkpoint, dtype, layout (`kv.prefix_root`).

Only full blocks are cached. Tokens are written behind the last known one, hence never into a full block: shared
blocks are never written, and no copy on write is needed (`BlockManager.check_integrity` proves it at run time).
"""

from __future__ import annotations

import hashlib
import struct

from millstream_runtime.engine.scheduling.sequence import Sequence


class PrefixCache:
    """Hashes to blocks and back. It holds no block: `BlockManager` counts the holders."""

    def __init__(self, root: bytes = b"") -> None:
        """`root`: differs where blocks of equal tokens hold other bytes; see `kv.prefix_root`."""
        self.root = root
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._hash_of)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def find(self, block_hash: bytes) -> int | None:
        """The block with these contents."""
        return self._block_of.get(block_hash)

    def insert(self, block_hash: bytes, block: int) -> None:
        """Add `block`, unless another block has the same contents already."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def remove(self, block: int) -> None:
        """Forget the contents of a block that is about to be overwritten. Unknown blocks are no error."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]


def extend_hashes(sequence: Sequence, block_size_tokens: int, root: bytes = b"") -> list[bytes]:
    """Extend `sequence.block_hashes` to all full blocks of tokens that are read, and return them."""
    hashes = sequence.block_hashes
    num_full_blocks = sequence.num_read_tokens // block_size_tokens
    if len(hashes) < num_full_blocks:
        layout = struct.Struct(f"<{block_size_tokens}I")
        parent = hashes[-1] if hashes else _first_parent(sequence, root)
        for index in range(len(hashes), num_full_blocks):
            start = index * block_size_tokens
            tokens = layout.pack(*sequence.token_ids[start : start + block_size_tokens])
            parent = hashlib.sha256(parent + tokens).digest()
            hashes.append(parent)
    return hashes


def _first_parent(sequence: Sequence, root: bytes) -> bytes:
    salt = sequence.request.cache_salt.encode("utf-8", "surrogatepass")
    fixed_size = hashlib.sha256(root).digest()
    return hashlib.sha256(b"millstream prefix cache\0%s%d\0%s" % (fixed_size, sequence.kv_variant, salt)).digest()
