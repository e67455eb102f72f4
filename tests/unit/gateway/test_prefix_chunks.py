"""Two requests share chunks where their prompts share a prefix and they may share a cache, and nowhere else."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from millstream_gateway.canonical_prompt import BodyError, canonical_prompt
from millstream_gateway.prefix_chunks import CHUNK_BYTES, chunk_hashes, scope
from millstream_gateway.routed_request import routed_request
from tests.support.gateway_requests import chat, text_of


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_a_chunk_stands_for_all_bytes_before_its_end() -> None:
    text = text_of(5 * CHUNK_BYTES + 17).encode()
    hashes = chunk_hashes(text, b"k" * 32)
    assert len(hashes) == 5
    for number, value in enumerate(hashes, 1):
        prefix = text[: number * CHUNK_BYTES]
        assert value == int.from_bytes(hashlib.blake2b(prefix, key=b"k" * 32, digest_size=8).digest(), "big")


def test_the_scope_is_the_hmac_of_the_api_key() -> None:
    assert scope("secret", "", "demo") == hmac.new(b"secret", b"0:4:demo", "sha256").digest()
    assert len({scope(*parts) for parts in [("a", "", "m"), ("", "a", "m"), ("a", "m", ""), ("", "", "am")]}) == 4


def test_a_conversation_grows_at_its_end_and_keeps_its_place() -> None:
    first = chat(text_of(2000))
    second = chat(text_of(2000), text_of(900, "answer"), text_of(600, "more"))
    assert shared(first.chunks, second.chunks) >= len(first.chunks) - 1
    assert second.conversation == first.conversation
    assert (first.previous_bytes, second.previous_bytes) == (0, first.text_bytes)


@pytest.mark.parametrize(
    "other",
    [
        chat(text_of(2000), api_key="another"),
        chat(text_of(2000), salt="another"),
        routed_request("r", "another", {"messages": [{"role": "user", "content": text_of(2000)}]}),
        routed_request("r", "demo", {"messages": [{"role": "system", "content": text_of(2000)}]}),
        routed_request(
            "r", "demo", {"messages": [{"role": "user", "content": text_of(2000)}], "tools": [{"type": "function"}]}
        ),
    ],
    ids=["API key", "cache_salt", "model", "role", "tools"],
)
def test_what_a_replica_does_not_share_shares_no_chunk(other: object) -> None:
    assert shared(chat(text_of(2000)).chunks, other.chunks) == 0  # type: ignore[attr-defined]


def test_conversations_of_one_application_have_places_of_their_own() -> None:
    first, second = (chat(word, system=text_of(3000)) for word in ("yes", "no"))
    assert first.conversation != second.conversation
    assert shared(first.chunks, second.chunks) >= 3000 // CHUNK_BYTES


def test_a_list_of_texts_is_the_same_prompt_as_one_text() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert canonical_prompt({"messages": [{"role": "user", "content": parts}]}) == canonical_prompt(
        {"messages": [{"content": "abc", "role": "user"}]}
    )


def test_completions_share_the_prefix_of_a_text_and_of_token_ids() -> None:
    texts = [routed_request("r", "demo", {"prompt": text_of(size)}) for size in (1000, 2000)]
    ids = [routed_request("r", "demo", {"prompt": [*range(1000, 1000 + size)]}) for size in (300, 600)]
    for short, long in (texts, ids):
        assert shared(short.chunks, long.chunks) >= len(short.chunks) - 1


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": "hi"}, {"messages": [1]}, {"prompt": 3}])
def test_a_body_without_a_prompt_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(BodyError, match="messages"):
        canonical_prompt(body)
