"""Conversations whose turns arrive as a Poisson process: the same requests, texts and times for every policy.

A turn's prompt is the whole conversation so far, as in the OpenAI API. Its answer is known beforehand, so that the next
turn has the same text whoever answers; how long it takes is the simulation's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from millstream_gateway.routed_request import RoutedRequest, routed_request

MODEL = "simulated"
BYTES_PER_TOKEN = 3.7  # of the texts, which a picker has to learn; each conversation's own is near it
BYTES_PER_TOKEN_DEVIATION = 0.05  # as a share
THINK_SECONDS = 2.0  # between an arrival and the next one of the same conversation, at least


@dataclass(frozen=True, slots=True)
class Shape:
    """Mean tokens of the parts of a conversation. Each is drawn from a log-normal distribution of this mean."""

    turns: int = 6
    first_tokens: float = 300.0
    message_tokens: float = 120.0
    answer_tokens: float = 160.0
    shared_tokens: int = 0  # of a system prompt that all conversations begin with


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `conversation` and `shared_tokens` say what it has in common with others."""

    conversation: int
    number: int  # within the conversation
    arrives_at_seconds: float
    prompt_tokens: int
    shared_tokens: int
    answer_tokens: int
    request: RoutedRequest


def trace(num_conversations: int, requests_per_second: float, shape: Shape, seed: int) -> list[Turn]:
    """Return all turns by arrival. Which conversation speaks next is drawn among those that had time to read."""
    rng = random.Random(f"{seed}/trace")
    conversations = [_conversation(index, shape, rng) for index in range(num_conversations)]
    free_at = [0.0] * num_conversations
    waiting = list(range(num_conversations))
    turns: list[Turn] = []
    seconds = 0.0
    while waiting:
        seconds += rng.expovariate(requests_per_second)
        ready = [index for index in waiting if free_at[index] <= seconds]
        index = rng.choice(ready) if ready else min(waiting, key=lambda one: free_at[one])
        seconds = max(seconds, free_at[index])
        turns.append(conversations[index].pop(0)(seconds))
        free_at[index] = seconds + THINK_SECONDS
        if not conversations[index]:
            waiting.remove(index)
    return turns


def _conversation(index: int, shape: Shape, rng: random.Random) -> list[Callable[[float], Turn]]:
    bytes_per_token = BYTES_PER_TOKEN * rng.gauss(1, BYTES_PER_TOKEN_DEVIATION)
    messages: list[dict[str, str]] = []
    if shape.shared_tokens:
        shared = random.Random("shared").randbytes(int(shape.shared_tokens * BYTES_PER_TOKEN / 2)).hex()
        messages.append({"role": "system", "content": shared})
    prompt_tokens = shape.shared_tokens
    made = []
    for number in range(shape.turns):
        mean = shape.message_tokens if number else shape.first_tokens
        message_tokens, answer_tokens = _log_normal(mean, rng), _log_normal(shape.answer_tokens, rng)
        messages.append({"role": "user", "content": _text(message_tokens, bytes_per_token, rng)})
        prompt_tokens += message_tokens
        request = routed_request(f"{index}-{number}", MODEL, {"messages": messages})
        made.append(_at(index, number, prompt_tokens, shape.shared_tokens, answer_tokens, request))
        messages.append({"role": "assistant", "content": _text(answer_tokens, bytes_per_token, rng)})
        prompt_tokens += answer_tokens
    return made


def _at(
    conversation: int, number: int, prompt: int, shared: int, answer: int, request: RoutedRequest
) -> Callable[[float], Turn]:
    return lambda seconds: Turn(conversation, number, seconds, prompt, shared, answer, request)


def _text(tokens: int, bytes_per_token: float, rng: random.Random) -> str:
    return rng.randbytes(max(1, int(tokens * bytes_per_token / 2))).hex()


def _log_normal(mean: float, rng: random.Random, sigma: float = 0.6) -> int:
    return max(8, int(mean * rng.lognormvariate(-sigma * sigma / 2, sigma)))
