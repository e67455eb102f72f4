"""A request as the picker sees it: hashes and sizes; the text itself is not kept."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

from millstream_gateway.canonical_text import canonical_text, conversation_start
from millstream_gateway.prefix_chunks import chunk_hashes, scope


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """`chunks`: hashes of the prompt's chunks. `conversation`: 32 bytes by which rendezvous hashing places it."""

    request_id: str
    model: str
    text_bytes: int
    chunks: tuple[int, ...]
    conversation: bytes


def routed_request(request_id: str, model: str, body: dict[str, Any], api_key: str = "") -> RoutedRequest:
    """Return what the picker needs to know of a body of `/v1/chat/completions` or `/v1/completions`.

    Raises:
        BodyError: it has no prompt.
    """
    salt = body.get("cache_salt")
    key = scope(api_key, salt if isinstance(salt, str) else "", model)
    text = canonical_text(body)
    conversation = hmac.digest(key, conversation_start(body), "sha256")
    return RoutedRequest(request_id, model, len(text), chunk_hashes(text, key), conversation)
