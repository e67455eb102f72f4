"""A long answer costs the same per token as a short one, and is the same as its parts."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from millstream_runtime.engine.request import FinishReason
from millstream_runtime.server.openai.choice import Delta, LogprobEntry
from millstream_runtime.server.openai.responses import (
    Answer,
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    json_encoder,
)

FORMATS = [ChatFormat("tiny"), CompletionFormat("tiny")]


def delta(number: int, *, is_last: bool = False) -> Delta:
    entry = LogprobEntry(b"ab", 2 * number, -0.5 - number, ((b"ab", -0.5 - number), (b"\xff", -9.0)))
    return Delta(0, "ab", FinishReason.LENGTH if is_last else None, (entry,), number + 1)


def collected(response_format: ResponseFormat, deltas: list[Delta]) -> dict[str, Any]:
    answer = Answer(response_format)
    for one in deltas:
        answer.add(one)
    choice: dict[str, Any] = json.loads(json_encoder.encode(response_format.complete([answer], {})))["choices"][0]
    return choice


@pytest.mark.parametrize("response_format", FORMATS, ids=["chat", "completion"])
def test_an_answer_in_pieces_is_the_answer_in_one(response_format: ResponseFormat) -> None:
    deltas = [delta(number, is_last=number == 9) for number in range(10)]
    entries = tuple(entry for one in deltas for entry in one.tokens or ())
    whole = Delta(0, "ab" * 10, FinishReason.LENGTH, entries, 10)
    found = collected(response_format, deltas)
    assert found == collected(response_format, [whole])
    assert found["finish_reason"] == "length"
    (lists,) = [found["logprobs"].get("content") or found["logprobs"]["token_logprobs"]]
    assert len(lists) == 10


@pytest.mark.parametrize("response_format", FORMATS, ids=["chat", "completion"])
def test_log_probabilities_of_no_tokens_are_empty_lists_and_unrequested_ones_null(
    response_format: ResponseFormat,
) -> None:
    stopped = collected(response_format, [Delta(0, "", FinishReason.STOP, ())])
    assert next(value for value in stopped["logprobs"].values() if value is not None) == []
    assert collected(response_format, [Delta(0, "a", FinishReason.STOP)])["logprobs"] is None


@pytest.mark.parametrize("response_format", FORMATS, ids=["chat", "completion"])
def test_a_token_of_a_long_answer_copies_nothing_of_what_came_before(response_format: ResponseFormat) -> None:
    """Counted in bytes that are allocated while a token is added, because a test does not measure time."""
    answer, tokens, allocated_bytes = Answer(response_format), 4000, 0
    one = delta(0)
    tracemalloc.start()
    try:
        for _ in range(tokens):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            answer.add(one)
            allocated_bytes += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert allocated_bytes < 8000 * tokens  # 16,000 and more where the tokens so far are copied
