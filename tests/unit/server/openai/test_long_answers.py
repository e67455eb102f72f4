"""A long answer costs the same per token as a short one, and is the same as its parts."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from starlette.types import Message

from millstream_runtime.engine.request import FinishReason
from millstream_runtime.server.openai.choice import Delta
from millstream_runtime.server.openai.json_parts import EncodedList, json_parts
from millstream_runtime.server.openai.logprob_entry import LogprobEntry
from millstream_runtime.server.openai.pieces import GROUP_SIZE
from millstream_runtime.server.openai.responses import (
    Answer,
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    encoded_response,
    json_encoder,
)
from millstream_runtime.server.routes import JsonResponse

FORMATS = [ChatFormat("tiny"), CompletionFormat("tiny")]


def delta(number: int, *, is_last: bool = False) -> Delta:
    entry = LogprobEntry(b"ab", 2 * number, -0.5 - number, ((b"ab", -0.5 - number), (b"\xff", -9.0)))
    return Delta(0, "ab", FinishReason.LENGTH if is_last else None, (entry,), number + 1)


def collected(response_format: ResponseFormat, deltas: list[Delta]) -> dict[str, Any]:
    answer = Answer(response_format)
    for one in deltas:
        answer.add(one)
    parts = encoded_response(response_format.complete([answer], {}), [answer])
    choice: dict[str, Any] = json.loads(b"".join(parts))["choices"][0]
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


@pytest.mark.parametrize("response_format", FORMATS, ids=["chat", "completion"])
def test_a_long_answer_is_encoded_in_parts_that_are_not_copied(response_format: ResponseFormat) -> None:
    num_tokens = 3 * GROUP_SIZE + 7
    answer, short = Answer(response_format), Answer(response_format)
    for number in range(num_tokens):
        answer.add(delta(number, is_last=number == num_tokens - 1))
    short.add(delta(0, is_last=True))
    parts = encoded_response(response_format.complete([short, answer], {}), [short, answer])
    largest_group = max(len(json.dumps(response_format.logprobs((entry,)))) for entry in delta(num_tokens).tokens or ())
    assert max(len(part) for part in parts) <= largest_group * GROUP_SIZE
    choices = json.loads(b"".join(parts))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    for name in response_format.logprobs(()):
        assert [len(choice["logprobs"][name]) for choice in choices] == [1, num_tokens]


@pytest.mark.parametrize("value", [{}, [], {"a": []}, {"é\n": [1, {"b": None}, 'x"']}, "x", 1.5, None])
def test_parts_are_the_document(value: object) -> None:
    assert b"".join(json_parts(value)) == json_encoder.encode(value)
    held = {"before": value, "list": EncodedList([b"1,2", b"3"]), "none": EncodedList([]), "after": value}
    assert json.loads(b"".join(json_parts(held))) == {"before": value, "list": [1, 2, 3], "none": [], "after": value}


def test_other_clients_have_a_turn_between_the_parts_of_a_long_answer() -> None:
    log: list[str] = []

    async def send(message: Message) -> None:
        log.append(message["body"].decode() if message["type"] == "http.response.body" else message["type"])

    async def receive() -> Message:
        raise AssertionError("nothing is asked of the client")

    async def main() -> None:
        answer = asyncio.ensure_future(JsonResponse([b"a", b"b", b"c"])({}, receive, send))
        while not answer.done():
            log.append("turn")
            await asyncio.sleep(0)

    asyncio.run(main())
    assert log == ["turn", "http.response.start", "a", "turn", "b", "turn", "c"]
