"""OpenAI's response objects, whole and as SSE chunks.

Fields that the specification requires but that have nothing to say here (`logprobs`, `refusal`) are null, not absent:
strict clients check for them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from millstream_runtime.engine.request import FinishReason
from millstream_runtime.server.api_errors import ApiError, internal_error
from millstream_runtime.server.generation import Delta, Generation
from millstream_runtime.server.logs import log

DONE = b"data: [DONE]\n\n"


class Dialect(Protocol):
    """How one route words its answers."""

    def whole(self, texts: Sequence[str], reasons: Sequence[FinishReason], usage: dict[str, int]) -> dict[str, Any]: ...
    def opening(self, index: int) -> dict[str, Any] | None: ...
    def chunk(self, delta: Delta) -> dict[str, Any]: ...
    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """`chat.completion` and `chat.completion.chunk`."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: Sequence[str], reasons: Sequence[FinishReason], usage: dict[str, int]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason.value,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self.frame(choices), "object": "chat.completion", "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chat_chunk(index, {"role": "assistant", "content": "", "refusal": None}, None)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return _chat_chunk(delta.index, {"content": delta.text} if delta.text else {}, delta.finish_reason)

    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    """`text_completion`, whole and in chunks."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, texts: Sequence[str], reasons: Sequence[FinishReason], usage: dict[str, int]) -> dict[str, Any]:
        choices = [
            self.chunk(Delta(index, text, reason))
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self.frame(choices), "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        reason = delta.finish_reason.value if delta.finish_reason else None
        return {"index": delta.index, "text": delta.text, "logprobs": None, "finish_reason": reason}

    def frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def whole_answer(generation: Generation, dialect: Dialect, choices: int) -> dict[str, Any]:
    """Collect every delta into one response object.

    Raises:
        ApiError: the engine stopped.
    """
    texts: list[list[str]] = [[] for _ in range(choices)]
    reasons = [FinishReason.ABORT] * choices
    async with aclosing(generation.deltas()) as deltas:
        async for news in deltas:
            for delta in news:
                texts[delta.index].append(delta.text)
                reasons[delta.index] = delta.finish_reason or reasons[delta.index]
    return dialect.whole(["".join(parts) for parts in texts], reasons, generation.usage)


async def sse_answer(generation: Generation, dialect: Dialect, include_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events: opening (role) chunk, deltas, finish chunk, usage chunk if asked for, `[DONE]`.

    A failure becomes one `error` event without `[DONE]` behind it, so that a cut answer never looks complete.
    """
    usage_so_far: dict[str, Any] = {"usage": None} if include_usage else {}
    opened: set[int] = set()
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for news in deltas:
                choices = [choice for delta in news for choice in _choices(dialect, delta, opened)]
                yield b"".join(sse_event({**dialect.frame([choice]), **usage_so_far}) for choice in choices)
    except ApiError as error:
        yield sse_event(error.body())
        return
    except Exception as error:  # a bug: the status line is already sent, so say it in the stream
        log.error("stream_failed", error=type(error).__name__)
        yield sse_event(internal_error().body())
        raise
    if include_usage:
        yield sse_event({**dialect.frame([]), "usage": generation.usage})
    yield DONE


def sse_event(payload: dict[str, Any]) -> bytes:
    """One event. JSON has no raw newline, so one `data:` line holds it."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _choices(dialect: Dialect, delta: Delta, opened: set[int]) -> list[dict[str, Any]]:
    """The `choices` entries for one delta: the opening of a new choice, its text, and the reason in one of its own."""
    choices = []
    if delta.index not in opened:
        opened.add(delta.index)
        opening = dialect.opening(delta.index)
        choices += [opening] if opening is not None else []
    if delta.text:
        choices.append(dialect.chunk(Delta(delta.index, delta.text)))
    if delta.finish_reason is not None:
        choices.append(dialect.chunk(Delta(delta.index, "", delta.finish_reason)))
    return choices


def _chat_chunk(index: int, delta: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": None,
        "finish_reason": reason.value if reason is not None else None,
    }
