"""The log-probabilities of a long prompt are made and encoded in turns with other clients, and are all there."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from millstream_runtime.engine.request import (
    FinishReason,
    Prefill,
    Request,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from millstream_runtime.server.engine.output_queue import OutputQueue
from millstream_runtime.server.openai.choice import ECHO_PART_TOKENS
from millstream_runtime.server.openai.generation import ENTRIES_FREED_PER_TURN, Generation, GenerationPlan
from millstream_runtime.server.openai.pieces import GROUP_SIZE
from millstream_runtime.server.openai.requests import StreamedUsage
from millstream_runtime.server.openai.responses import CompletionFormat, complete_response, sse_events

TOP = ((1, -0.25), (2, -1.5))
CALLS_PER_TOKEN = 2 * (1 + len(TOP))  # of `token_bytes`: in the echo and in `prompt_logprobs`, and in the offsets


class Letters:
    """A tokenizer of letters that counts what is asked of it."""

    def __init__(self) -> None:
        self.num_calls = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.num_calls += 1
        return bytes([97 + token_id % 26])

    def detokenizer(self) -> Letters:
        return Letters()

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return ""


class OneStepEngine:
    """Answers a prompt with one token as soon as it is submitted."""

    def submit(self, request: Request, queue: OutputQueue) -> None:
        known = [None, *(TokenLogprobs(token, -0.5, 3, TOP) for token in request.prompt_token_ids[1:])]
        prefill = Prefill(scheduled_at_seconds=0.0, num_cached_tokens=0, prompt_logprobs=tuple(known))
        logprobs = TokenLogprobs(4, -0.125, 1, TOP)
        queue.put(0.0, TokenOutput(request.request_id, 4, FinishReason.LENGTH, logprobs, prefill))

    def abort(self, request_id: str) -> None:
        raise AssertionError(f"{request_id} has ended")


class Silent:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def generation_of(num_tokens: int, letters: Any, *, streams: bool) -> Generation:
    prompt = [number % 1000 for number in range(num_tokens)]
    plan = GenerationPlan(
        prompts=[prompt],
        sampling=[SamplingParams(1, logprobs=2, prompt_logprobs=2)],
        echoes=["".join(map(letters.push, prompt))],
        shows_logprobs=True,
        shows_prompt_logprobs=not streams,
    )
    engine: Any = OneStepEngine()
    metrics: Any = Silent()
    generation = Generation(engine, letters, metrics, plan, arrived_at_seconds=0.0)
    generation.submit(streams=streams)
    return generation


async def answered(num_tokens: int, letters: Letters, *, streams: bool) -> tuple[list[bytes], list[int]]:
    """The parts of the answer, and the tokens that were looked up in each turn of the event loop."""
    generation = generation_of(num_tokens, letters, streams=streams)

    async def answer() -> list[bytes]:
        if not streams:
            return await complete_response(generation, CompletionFormat("tiny"))
        events = sse_events(generation, CompletionFormat("tiny"), StreamedUsage.NONE, "request")
        return [event async for event, _ in events]

    task, turns, before = asyncio.ensure_future(answer()), [], 0
    while not task.done():
        await asyncio.sleep(0)
        turns.append(letters.num_calls - before)
        before = letters.num_calls
    return await task, turns


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_tokens", [1, ECHO_PART_TOKENS, ECHO_PART_TOKENS + 1, 2 * GROUP_SIZE + 5])
def test_a_turn_makes_a_bounded_part_of_a_prompts_logprobs(num_tokens: int, streams: bool) -> None:
    letters = Letters()
    parts, turns = asyncio.run(answered(num_tokens, letters, streams=streams))
    assert max(turns) <= 2 * CALLS_PER_TOKEN * (ECHO_PART_TOKENS + 1)
    assert sum(turns) == letters.num_calls >= CALLS_PER_TOKEN // 2 * (num_tokens - 1)
    if streams:
        events = [event.removeprefix("data: ") for event in b"".join(parts).decode().split("\n\n")]
        choices = [json.loads(event)["choices"][0] for event in events if event not in ("", "[DONE]")]
    else:
        choices = json.loads(b"".join(parts))["choices"]
        assert [one is None for one in choices[0]["prompt_logprobs"]] == [True] + [False] * (num_tokens - 1)
    tokens = [token for one in choices if one["logprobs"] for token in one["logprobs"]["tokens"]]
    offsets = [offset for one in choices if one["logprobs"] for offset in one["logprobs"]["text_offset"]]
    assert "".join(tokens) == "".join(one["text"] for one in choices)
    assert offsets == list(range(num_tokens + 1))


def test_the_answer_of_a_long_prompt_is_sent_in_parts() -> None:
    parts, _ = asyncio.run(answered(6 * GROUP_SIZE, Letters(), streams=False))
    assert len(parts) > 6
    assert max(map(len, parts)) < len(b"".join(parts)) / 5


def test_what_was_known_of_a_long_prompt_is_freed_in_turns() -> None:
    """Whatever ends the request: to free all at once would hold the event loop."""

    async def held_after_each_turn() -> list[int]:
        generation = generation_of(3 * ENTRIES_FREED_PER_TURN, Letters(), streams=False)
        await complete_response(generation, CompletionFormat("tiny"))
        known = list(generation.prompt_logprobs(0) or ())[1:]
        before = sys.getrefcount(known[0])
        generation.close()
        held = []
        for _ in range(4):
            held.append(sum(sys.getrefcount(known[index]) == before for index in range(len(known))))
            await asyncio.sleep(0)
        return held

    assert asyncio.run(held_after_each_turn()) == [2 * ENTRIES_FREED_PER_TURN - 1, ENTRIES_FREED_PER_TURN - 1, 0, 0]
