"""What a draft model reads of prompts is bounded by time, and what it reads is worth it."""

from __future__ import annotations

from millstream_runtime.engine.speculation.catching_up import (
    CHUNK_SECONDS,
    FIRST_TOKENS,
    LEAST_TOKENS,
    MOST_TOKENS,
    CatchingUp,
)


def test_decodes_are_always_read_and_prompts_in_order() -> None:
    assert FIRST_TOKENS == 64
    assert CatchingUp(2048).divide([(2, 9), (50, 9), (1, 9), (20, 9), (30, 9)]) == [2, 50, 1, 14, 0]
    assert CatchingUp(16).divide([(50, 9), (4, 1)]) == [16, 4]


def test_what_ends_before_it_is_read_is_left_alone() -> None:
    assert CatchingUp(2048).divide([(200, 4), (200, 5)]) == [0, 64]


def test_a_chunk_takes_as_long_as_it_may() -> None:
    fast, slow, middle = CatchingUp(2048), CatchingUp(2048), CatchingUp(2048)
    fast.observe(100, 0.0)
    slow.observe(64, 10.0)
    for _ in range(30):
        middle.observe(64, 64 * CHUNK_SECONDS / 200)
        middle.observe(8, 1.0)  # too short to tell
    assert [one.chunk_tokens for one in (fast, slow, middle)] == [MOST_TOKENS, LEAST_TOKENS, 200]


def test_what_reading_takes_is_known_from_earlier_chunks() -> None:
    reads = CatchingUp(2048)
    assert reads.seconds(1000) == 0.0
    reads.observe(100, 0.2)
    assert reads.seconds(1000) == 2.0
    assert reads.seconds(4) == 0.0, "read in any case"
