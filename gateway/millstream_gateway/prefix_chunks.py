"""A prompt as a chain of chunk hashes: two prompts share the hashes of what they share from their first byte on.

    text   |  256 bytes  |  256 bytes  | rest      a chunk's hash covers all bytes before its end,
    chunks |     c0      |     c1      |           so c1 stands for the first 512; a rest has none

The hashes are keyed by `scope`, so whoever has no right to another client's cache shares no chunk with it, and nobody
who reads the picker's memory learns a prompt by trying texts.
"""

from __future__ import annotations

import hashlib
import hmac

CHUNK_BYTES = 256  # some 64 tokens: an error of half a chunk is less than a decode step takes to compute
HASH_BYTES = 8


def scope(api_key: str, cache_salt: str, model: str) -> bytes:
    """Return the HMAC of what a replica's own prefix cache is divided by. 32 bytes."""
    parts = b"".join(f"{len(part)}:{part}".encode("utf-8", "surrogatepass") for part in (cache_salt, model))
    return hmac.digest(api_key.encode("utf-8", "surrogatepass"), parts, "sha256")


def chunk_hashes(text: bytes, key: bytes) -> tuple[int, ...]:
    """Return the hash of each whole chunk. `key`: a `scope`."""
    state = hashlib.blake2b(key=key, digest_size=HASH_BYTES)
    hashes = []
    for end in range(CHUNK_BYTES, len(text) + 1, CHUNK_BYTES):
        state.update(text[end - CHUNK_BYTES : end])
        hashes.append(int.from_bytes(state.copy().digest(), "big"))
    return tuple(hashes)
