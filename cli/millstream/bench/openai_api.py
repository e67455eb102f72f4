"""One OpenAI streaming request: the body that is sent, and the record that is filled from the events."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from millstream.bench.client import HttpClient, RequestFailed
from millstream.bench.measure import RequestRecord

Clock = Callable[[], float]  # seconds since the start of the run


class Route(StrEnum):
    """Which API is measured."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Route.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """The parameters that all requests share. `ignore_eos` is an extension that OpenAI's own API rejects."""

    model: str
    route: Route = Route.COMPLETIONS
    temperature: float = 0.0
    ignore_eos: bool = True

    def body(self, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
        """The JSON of one request."""
        content: dict[str, Any] = {"prompt": prompt}
        if self.route is Route.CHAT:
            content = {"messages": [{"role": "user", "content": prompt}]}
        return {
            "model": self.model,
            **content,
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            **({"ignore_eos": True} if self.ignore_eos else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


async def send_request(
    client: HttpClient, route: Route, body: dict[str, Any], record: RequestRecord, clock: Clock
) -> None:
    """Send `body` and fill `record`. A failure is a sentence in `record.error`, never an exception."""
    answer = StreamedAnswer(record)
    try:
        async with aclosing(client.post_sse(route.path, body)) as events:  # type: ignore[type-var]
            async for data in events:
                answer.take(data, clock())
        answer.finish()
    except RequestFailed as failure:
        record.error = str(failure)
    record.end_seconds = clock()


class StreamedAnswer:
    """Reads the events of one stream. Counts come from `usage`, which is in the last chunk."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._finish_seconds: float | None = None
        self._has_usage = False
        self._done = False

    def take(self, data: str, at_seconds: float) -> None:
        """One event's data, which arrived at `at_seconds`.

        Raises:
            RequestFailed: an error event, or something that is no chunk.
        """
        if data == "[DONE]":
            self._done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise RequestFailed("The stream has an event that is not a JSON object.")
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise RequestFailed(f"The stream ended in an error: {' '.join(str(message).split())[:300]}")
        choices = chunk.get("choices") or []
        if any(map(_text, choices)):
            self._record.chunk_seconds.append(at_seconds)
        if any(choice.get("finish_reason") for choice in choices):
            self._finish_seconds = at_seconds
        if usage := chunk.get("usage"):
            self._has_usage = True
            self._record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._record.completion_tokens = int(usage.get("completion_tokens") or 0)

    def finish(self) -> None:
        """The stream is over.

        Raises:
            RequestFailed: it was cut, or it had no `usage`.
        """
        if not self._done:
            raise RequestFailed("The stream ended without [DONE].")
        if not self._has_usage:
            raise RequestFailed("The stream had no usage; the endpoint must honour stream_options.include_usage.")
        if not self._record.chunk_seconds:  # tokens that token_bytes nothing: the end is the first thing a user sees
            if self._finish_seconds is None:
                raise RequestFailed("The stream had neither text nor an end.")
            self._record.chunk_seconds.append(self._finish_seconds)


def _text(choice: dict[str, Any]) -> str:
    """New text of a choice: a completion's, a chat's, or a reasoning model's thoughts."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
