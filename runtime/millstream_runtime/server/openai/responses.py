"""OpenAI's response objects, complete and as SSE chunks.

Fields that the specification requires but that have no value here (`logprobs`, `refusal`) are null, not absent: strict
clients check for them.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from millstream_runtime.engine.request import FinishReason
from millstream_runtime.logs import log
from millstream_runtime.server.http.api_errors import ApiError, internal_error
from millstream_runtime.server.http.disconnect import ClientDisconnectedError
from millstream_runtime.server.openai.choice import Delta, LogprobEntry
from millstream_runtime.server.openai.generation import Generation
from millstream_runtime.server.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs

json_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # an SSE comment: clients skip it


@dataclass(slots=True)
class Answer:
    """One choice, complete."""

    text: str = ""
    finish_reason: FinishReason = FinishReason.ABORT
    tokens: list[LogprobEntry] | None = None  # None: log-probabilities were not requested
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    def add(self, delta: Delta) -> None:
        """Append new text of this choice."""
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.tokens is not None:
            self.tokens = [*(self.tokens or ()), *delta.tokens]


class ResponseFormat(Protocol):
    """The response objects of one route."""

    def complete(self, answers: Sequence[Answer], usage: dict[str, object]) -> dict[str, Any]:
        """The response of a request that does not stream."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first entry of a streamed choice; None where the route has none."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A further entry of a streamed choice."""

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The object around `choices`."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{os.urandom(16).hex()}")
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, answers: Sequence[Answer], usage: dict[str, object]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": chat_logprobs(answer.tokens),
                "finish_reason": answer.finish_reason.value,
            }
            for index, answer in enumerate(answers)
        ]
        return {**self.envelope(choices), "object": "chat.completion", "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chat_chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def chunk(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text or delta.tokens else {}
        return _chat_chunk(delta.index, content, delta.finish_reason, chat_logprobs(delta.tokens))

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """`text_completion`, complete and in chunks."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{os.urandom(16).hex()}")
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, answers: Sequence[Answer], usage: dict[str, object]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            tokens = tuple(answer.tokens) if answer.tokens is not None else None
            choice = self.chunk(Delta(index, answer.text, answer.finish_reason, tokens))
            if answer.prompt_logprobs is not None:
                choice["prompt_logprobs"] = answer.prompt_logprobs
            choices.append(choice)
        return {**self.envelope(choices), "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.tokens),
            "finish_reason": delta.finish_reason.value if delta.finish_reason else None,
        }

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def complete_response(generation: Generation, response_format: ResponseFormat) -> dict[str, Any]:
    """Collect every delta into one response object.

    Raises:
        ApiError: the engine stopped.
        ClientDisconnectedError: the client closed the connection.
    """
    answers = [Answer() for _ in range(generation.num_choices)]
    async with aclosing(generation.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                answers[delta.index].add(delta)
    for index, answer in enumerate(answers):
        answer.prompt_logprobs = prompt_logprobs(generation.prompt_logprobs(index), generation.token_bytes)
    return response_format.complete([answers[index] for index in generation.shown_choices()], generation.usage)


async def sse_events(
    generation: Generation, response_format: ResponseFormat, include_usage: bool
) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield server-sent events, and whether they are the last: opening (role) chunk, deltas, finish chunk, usage chunk
    if requested, `[DONE]`. Events that are known at the same time come in one piece.

    A failure becomes one `error` event without a `[DONE]` after it, so that a cut answer never looks complete.
    """
    usage_so_far: dict[str, Any] = {"usage": None} if include_usage else {}
    opened: set[int] = set()
    last: list[bytes] = []
    try:
        async with aclosing(generation.deltas()) as batches:
            async for deltas in batches:
                if not deltas:
                    yield KEEP_ALIVE, False
                    continue
                choices = [choice for delta in deltas for choice in _choices(response_format, delta, opened)]
                events = [sse_event({**response_format.envelope([choice]), **usage_so_far}) for choice in choices]
                if generation.has_ended:
                    last = events
                    break
                yield b"".join(events), False
    except ApiError as error:
        yield sse_event(error.body()), True
        return
    except ClientDisconnectedError:
        yield b"", True
        return
    except Exception as error:  # a bug: the status line is already sent, so report it in the stream
        log.error("stream_failed", error=type(error).__name__)
        yield sse_event(internal_error().body()), False
        raise
    if include_usage:
        last.append(sse_event({**response_format.envelope([]), "usage": generation.usage}))
    yield b"".join((*last, DONE)), True


def sse_event(payload: dict[str, Any]) -> bytes:
    """Encode one event. JSON has no raw newline, so one `data:` line holds it."""
    return b"data: " + json_encoder.encode(payload) + b"\n\n"


def _choices(response_format: ResponseFormat, delta: Delta, opened: set[int]) -> list[dict[str, Any]]:
    """The `choices` entries for one delta: the opening of a new choice, its text, the finish reason by itself."""
    choices = []
    if delta.index not in opened:
        opened.add(delta.index)
        opening = response_format.opening(delta.index)
        choices += [opening] if opening is not None else []
    if delta.text or delta.tokens:
        choices.append(response_format.chunk(Delta(delta.index, delta.text, None, delta.tokens)))
    if delta.finish_reason is not None:
        choices.append(response_format.chunk(Delta(delta.index, "", delta.finish_reason)))
    return choices


def _chat_chunk(
    index: int,
    delta: dict[str, Any],
    reason: FinishReason | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": reason.value if reason is not None else None,
    }
