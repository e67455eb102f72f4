"""The log-probabilities of a long prompt cross the socket in bounded messages, and arrive as they were sent."""

from __future__ import annotations

import gc

import pytest

from millstream_runtime.engine.request import EngineStats, FinishReason, Prefill, TokenLogprobs, TokenOutput
from millstream_runtime.engine_process.messages import (
    Event,
    PromptLogprobs,
    Refused,
    StepDone,
    decode_event,
    encode,
)
from millstream_runtime.engine_process.prompt_parts import PART_TOKENS, PromptParts, in_parts

STATS = EngineStats(1, 0, 10, 1, 16, 0, 1)


def output_of(name: str, num_tokens: int | None) -> TokenOutput:
    """The first token of a prompt; None: its log-probabilities are not asked for."""
    entries = None
    if num_tokens is not None:
        entries = (None, *(TokenLogprobs(token, -0.5, 2, ((1, -0.25),)) for token in range(1, num_tokens)))
    return TokenOutput(name, 7, FinishReason.LENGTH, None, Prefill(0.5, 0, entries))


def received(messages: list[Event]) -> list[Event]:
    parts = PromptParts()
    events: list[Event] = []
    for message in messages:
        if isinstance(message, PromptLogprobs):
            parts.add(message)
        else:
            events.append(parts.complete(message) if isinstance(message, StepDone) else message)
    return events


@pytest.mark.parametrize(
    "lengths", [[], [None], [1, PART_TOKENS], [PART_TOKENS + 1], [None, 3 * PART_TOKENS, 5, PART_TOKENS + 44]]
)
def test_a_step_arrives_as_it_was_sent(lengths: list[int | None]) -> None:
    outputs = [TokenOutput("decode", 3), *(output_of(str(place), length) for place, length in enumerate(lengths))]
    step = StepDone(tuple(outputs), STATS, 1.5)
    messages = [decode_event(encode(message)) for message in in_parts(step)]
    assert received(messages) == [step]
    for message in messages[:-1]:
        assert isinstance(message, PromptLogprobs)
        assert 0 < len(message.entries) <= PART_TOKENS
    num_long = sum(-(-length // PART_TOKENS) for length in lengths if length and length > PART_TOKENS)
    assert len(messages) == 1 + num_long


def test_other_events_are_sent_as_they_are() -> None:
    assert [*in_parts(Refused("a", "no"))] == [Refused("a", "no")]


def test_what_arrives_of_a_long_prompt_is_nothing_that_the_garbage_collector_looks_at() -> None:
    """Each of its full collections would hold the event loop for longer, the longer the prompt."""
    messages = [decode_event(encode(message)) for message in in_parts(StepDone((output_of("0", 1000),), STATS, 1.5))]
    (step,) = received(messages)
    del messages
    for _ in range(2):  # each stops looking at tuples of what it does not look at
        gc.collect()
    assert isinstance(step, StepDone)
    prefill = step.outputs[0].prefill
    assert prefill is not None
    entries = [entry for entry in prefill.prompt_logprobs or () if entry is not None]
    assert len(entries) == 999
    assert not any(gc.is_tracked(one) for entry in entries for one in (entry, entry.top))
