"""Rendezvous hashing: each conversation ranks the replicas in its own order, the same for all pickers.

A replica that comes or goes changes the first place of only those conversations that it takes or leaves (Thaler and
Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998).
"""

from __future__ import annotations

import hashlib


def rendezvous_score(conversation: bytes, endpoint: str) -> int:
    """Return the replica's score for this conversation; the highest is its first place."""
    digest = hashlib.blake2b(endpoint.encode(), key=conversation, digest_size=8).digest()
    return int.from_bytes(digest, "big")
