"""OpenAI's response objects, complete and as SSE chunks.

Fields that the specification requires but that have no value here (`logprobs`, `refusal`) are null, not absent: strict
clients check for them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from millstream_runtime.engine.request import FinishReason, TokenLogprobs
from millstream_runtime.server.http.api_errors import ApiError, internal_error
from millstream_runtime.server.http.disconnect import ClientDisconnectedError
from millstream_runtime.server.http.failure_log import log_failure
from millstream_runtime.server.openai.choice import ECHO_PART_TOKENS, Delta
from millstream_runtime.server.openai.generation import Generation
from millstream_runtime.server.openai.json_parts import EncodedList, json_parts
from millstream_runtime.server.openai.logprob_entry import LogprobEntry, TokenBytes
from millstream_runtime.server.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from millstream_runtime.server.openai.pieces import Pieces
from millstream_runtime.server.openai.requests import StreamedUsage

json_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # an SSE comment: clients skip it
PROMPT_GROUP_TOKENS = 256  # of `prompt_logprobs`: with 20 alternatives 0.3 MB, and several clients may join one at once


class Answer:
    """One choice, collected: each token is encoded when it comes, and the pieces are joined in groups.

    A whole answer encoded, joined or sent in one call would block the event loop: 64k tokens with alternatives are
    100 MB of JSON.
    """

    def __init__(self, response_format: ResponseFormat) -> None:
        self.finish_reason = FinishReason.ABORT
        self.prompt_logprobs: msgspec.Raw | EncodedList | None = None
        self._format = response_format
        self._text = Pieces("")
        self._logprobs: dict[str, Pieces[bytes]] | None = None  # the items of each list; None: not requested

    def add(self, delta: Delta) -> None:
        """Append new text of this choice."""
        self._text.append(delta.text)
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.tokens is None:
            return
        if self._logprobs is None:
            self._logprobs = {name: Pieces(b",") for name in self._format.logprobs(())}
        if delta.tokens:
            for name, entries in self._format.logprobs(delta.tokens).items():
                self._logprobs[name].append(_encoded_items(entries), len(entries))

    @property
    def text(self) -> str:
        return self._text.joined()

    @property
    def is_long(self) -> bool:
        """Whether `logprobs` or `prompt_logprobs` are EncodedLists."""
        are_many = self._logprobs is not None and any(pieces.are_many for pieces in self._logprobs.values())
        return are_many or isinstance(self.prompt_logprobs, EncodedList)

    @property
    def logprobs(self) -> dict[str, msgspec.Raw | EncodedList] | None:
        """The lists of `choices[].logprobs`, encoded; None if log-probabilities were not requested."""
        if self._logprobs is None:
            return None
        return {name: _encoded_list(pieces) for name, pieces in self._logprobs.items()}


def _encoded_list(pieces: Pieces[bytes]) -> msgspec.Raw | EncodedList:
    """The list whose items, encoded, are `pieces`."""
    return EncodedList(pieces.groups()) if pieces.are_many else msgspec.Raw(b"[%b]" % pieces.joined())


def _encoded_items(values: Sequence[Any]) -> bytes:
    return json_encoder.encode(values)[1:-1]  # without the brackets


class ResponseFormat(Protocol):
    """The response objects of one route."""

    def logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
        """The lists of `choices[].logprobs` for these tokens; those of an answer are these, one after another."""

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

    def logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
        return chat_logprobs(entries)

    def complete(self, answers: Sequence[Answer], usage: dict[str, object]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": _chat_choice_logprobs(answer.logprobs),
                    "finish_reason": answer.finish_reason.value,
                }
            )
        return {**self.envelope(choices), "object": "chat.completion", "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chat_chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def chunk(self, delta: Delta) -> dict[str, Any]:
        content = {} if delta.finish_reason is not None else {"content": delta.text}
        lists = self.logprobs(delta.tokens) if delta.tokens is not None else None
        return _chat_chunk(delta.index, content, delta.finish_reason, _chat_choice_logprobs(lists))

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

    def logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
        return completion_logprobs(entries)

    def complete(self, answers: Sequence[Answer], usage: dict[str, object]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            choice = _completion_choice(index, answer.text, answer.logprobs, answer.finish_reason)
            if answer.prompt_logprobs is not None:
                choice["prompt_logprobs"] = answer.prompt_logprobs
            choices.append(choice)
        return {**self.envelope(choices), "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        lists = self.logprobs(delta.tokens) if delta.tokens is not None else None
        return _completion_choice(delta.index, delta.text, lists, delta.finish_reason)

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def complete_response(generation: Generation, response_format: ResponseFormat) -> list[bytes]:
    """Collect every delta into one response object, as JSON: one part, or of a long answer several.

    Raises:
        ApiError: the engine stopped.
        ClientDisconnectedError: the client closed the connection.
    """
    answers = [Answer(response_format) for _ in range(generation.num_choices)]
    async with aclosing(generation.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                answers[delta.index].add(delta)
    for index, answer in enumerate(answers):
        entries = generation.prompt_logprobs(index)
        if entries is not None:
            answer.prompt_logprobs = await _prompt_logprobs(entries, generation.token_bytes)
    shown = [answers[index] for index in generation.shown_choices()]
    return encoded_response(response_format.complete(shown, generation.usage), shown)


async def _prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], token_bytes: TokenBytes
) -> msgspec.Raw | EncodedList:
    """The list of `choices[].prompt_logprobs`, encoded; a long one in turns with all other clients."""
    pieces = Pieces(b",", PROMPT_GROUP_TOKENS)
    for first in range(0, len(entries), ECHO_PART_TOKENS):
        if first:
            await asyncio.sleep(0)
        some = entries[first : first + ECHO_PART_TOKENS]
        pieces.append(_encoded_items(prompt_logprobs(some, token_bytes)), len(some))
    return _encoded_list(pieces)


def encoded_response(response: dict[str, Any], answers: Sequence[Answer]) -> list[bytes]:
    """The response object of `answers` as JSON."""
    if any(answer.is_long for answer in answers):
        return json_parts(response)
    return [json_encoder.encode(response)]


async def sse_events(
    generation: Generation, response_format: ResponseFormat, streamed_usage: StreamedUsage, request_id: str
) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield server-sent events, and whether they are the last: opening (role) chunk, deltas, finish chunk, usage chunk
    if requested, `[DONE]`. Events that are known at the same time come in one piece.

    A failure becomes one `error` event without a `[DONE]` after it, so that a cut answer never looks complete. It is
    logged with `request_id`.
    """
    chunks = _Chunks(generation, response_format, streamed_usage)
    last: list[bytes] = []
    try:
        async with aclosing(generation.deltas()) as batches:
            async for deltas in batches:
                if not deltas:
                    yield KEEP_ALIVE, False
                    continue
                events = [event for delta in deltas for event in chunks.of_delta(delta)]
                if generation.has_ended:
                    last = events
                    break
                yield b"".join(events), False
    except ApiError as error:
        log_failure(request_id, error)
        yield sse_event(error.body()), True
        return
    except ClientDisconnectedError:
        yield b"", True
        return
    except Exception:  # a bug: the status line is already sent, so report it in the stream
        yield sse_event(internal_error().body()), False
        raise
    if streamed_usage is not StreamedUsage.NONE:
        last.append(sse_event({**response_format.envelope([]), "usage": generation.usage}))
    yield b"".join((*last, DONE)), True


class _Chunks:
    """The chunks of one stream: the opening of each choice, its text, its finish reason by itself."""

    def __init__(self, generation: Generation, response_format: ResponseFormat, streamed_usage: StreamedUsage) -> None:
        self._generation = generation
        self._format = response_format
        self._streamed_usage = streamed_usage
        self._num_tokens: dict[int, int] = {}  # of each choice that has begun

    def of_delta(self, delta: Delta) -> list[bytes]:
        """The events of one delta."""
        choices = []
        if delta.index not in self._num_tokens:
            opening = self._format.opening(delta.index)
            choices += [opening] if opening is not None else []
        self._num_tokens[delta.index] = delta.num_tokens
        if delta.text or delta.tokens or delta.finish_reason is None:
            choices.append(self._format.chunk(replace(delta, finish_reason=None)))
        if delta.finish_reason is not None:
            choices.append(self._format.chunk(Delta(delta.index, "", delta.finish_reason)))
        usage = self._usage_so_far()
        return [sse_event({**self._format.envelope([choice]), **usage}) for choice in choices]

    def _usage_so_far(self) -> dict[str, Any]:
        if self._streamed_usage is StreamedUsage.NONE:
            return {}
        if self._streamed_usage is StreamedUsage.LAST_CHUNK:
            return {"usage": None}
        return {"usage": self._generation.usage_with(sum(self._num_tokens.values()))}


def sse_event(payload: dict[str, Any]) -> bytes:
    """Encode one event. JSON has no raw newline, so one `data:` line holds it."""
    return b"data: " + json_encoder.encode(payload) + b"\n\n"


def _chat_choice_logprobs(lists: dict[str, Any] | None) -> dict[str, Any] | None:
    return {**lists, "refusal": None} if lists is not None else None


def _completion_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason.value if reason is not None else None,
    }


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
