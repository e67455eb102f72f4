"""A request as the picker sees it: hashes and sizes; the text itself is not kept."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

from millstream_gateway.canonical_prompt import canonical_prompt
from millstream_gateway.prefix_chunks import chunk_hashes, scope


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """`chunks`: hashes of the prompt's chunks. `conversation`: 32 bytes by which rendezvous hashing places it.

    `previous_bytes`: of the text that was the prompt of the conversation's turn before; 0 for a first turn.
    """

    request_id: str
    model: str
    text_bytes: int
    previous_bytes: int
    chunks: tuple[int, ...]
    conversation: bytes


def routed_request(request_id: str, model: str, body: dict[str, Any], api_key: str = "") -> RoutedRequest:
    """Return what the picker needs to know of a body of `/v1/chat/completions` or `/v1/completions`.

    Raises:
        BodyError: it has no prompt.
    """
    salt = body.get("cache_salt")
    key = scope(api_key, salt if isinstance(salt, str) else "", model)
    prompt = canonical_prompt(body)
    chunks = chunk_hashes(prompt.text, key)
    conversation = hmac.digest(key, prompt.start, "sha256")
    return RoutedRequest(request_id, model, len(prompt.text), prompt.previous_bytes, chunks, conversation)
