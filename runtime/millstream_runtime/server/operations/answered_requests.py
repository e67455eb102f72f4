"""The last answers of this boot, for `/load`: by a hash of the request's id, tokens of prompt and answer.

    add -> [ 17 | 18 | 19 | 20 ]      since "boot-18" -> 19 and 20, cursor "boot-20"
             the last MOST_ANSWERS

A reader asks again with the cursor that it was given, and so sees each answer once. What the ring has dropped meanwhile
is counted as missed. A cursor of another boot is that of a reader who knows nothing of this one: it gets all.

`/load` is open, and ids are what clients chose. So the first 64 bits of an id's SHA-256 stand for it: who has sent a
request, or passed it on, finds its answer, and nobody reads an id. No key is part of the hash, because each of its
readers would need it; an id of 122 random bits (a UUID) is guessed with a key as little as without.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque

import msgspec

from millstream_runtime.server.http.api_errors import ApiError

MOST_ANSWERS = 256
HASH_HEX_DIGITS = 16
_CURSOR = re.compile(r"([0-9a-f]{16})-(0|[1-9][0-9]{0,14})", re.ASCII)


class AnswerTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one HTTP request whose prompts were computed."""

    prompt_tokens: int
    cached_tokens: int  # of the prompts, found in the prefix cache
    completion_tokens: int
    ttft_seconds: float  # from its arrival to its first token


class AnsweredRequest(msgspec.Struct, frozen=True, gc=False):
    """An entry of the ring, as `/load` shows it. `id`: see `hash_of`."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_seconds: float


class AnswersSince(msgspec.Struct, frozen=True):
    """What a reader has not seen yet. `missed`: answers that the ring has dropped before this reader asked."""

    cursor: str
    missed: int
    answers: list[AnsweredRequest]


class AnsweredRequests:
    """The ring. Used on the event loop only."""

    def __init__(self) -> None:
        self._boot_id = ""
        self._num_answers = 0  # of this boot
        self._last: deque[AnsweredRequest] = deque(maxlen=MOST_ANSWERS)

    def begin_boot(self, boot_id: str) -> None:
        """Forget all answers: what they say of the prefix cache was true of an engine that is gone."""
        self._boot_id, self._num_answers = boot_id, 0
        self._last.clear()

    def add(self, boot_id: str, request_id: str, tokens: AnswerTokens | None) -> None:
        """Record the end of a request. `boot_id`: of the engine that computed it. `tokens` None: no prompt of it was
        computed."""
        if tokens is None or boot_id != self._boot_id:
            return
        self._num_answers += 1
        self._last.append(
            AnsweredRequest(
                hash_of(request_id),
                tokens.prompt_tokens,
                tokens.cached_tokens,
                tokens.completion_tokens,
                round(tokens.ttft_seconds, 6),
            )
        )

    def since(self, cursor: str | None) -> AnswersSince:
        """Return the answers behind a cursor; None: all that are known.

        Raises:
            ApiError: 400, no such cursor was ever given.
        """
        seen = 0 if cursor is None else self._seen_at(cursor)
        num_new = self._num_answers - seen
        num_known = min(num_new, len(self._last))
        answers = list(self._last)[len(self._last) - num_known :]
        return AnswersSince(f"{self._boot_id}-{self._num_answers}", num_new - num_known, answers)

    def _seen_at(self, cursor: str) -> int:
        match = _CURSOR.fullmatch(cursor)
        if match is None:
            raise _invalid(cursor, "it must be the 'cursor' of an earlier answer of /load")
        boot_id, count = match[1], int(match[2])
        if boot_id != self._boot_id:
            return 0
        if count > self._num_answers:
            raise _invalid(cursor, f"this boot has given no cursor beyond {self._boot_id}-{self._num_answers}")
        return count


def hash_of(request_id: str) -> str:
    """What stands for an id in `/load`."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:HASH_HEX_DIGITS]


def _invalid(cursor: str, wanted: str) -> ApiError:
    got = f"'{cursor}'" if cursor.isascii() and cursor.isprintable() and len(cursor) <= 60 else "something else"
    message = f"Invalid 'since': {wanted}; got {got}. Leave it out to get all that is known."
    return ApiError(400, message, param="since", code="invalid_value")
