"""A token of a choice's text with its log-probability, in bytes and characters instead of ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream_runtime.engine.request import TokenLogprobs

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """A token of the text, its log-probability and the top alternatives."""

    token: bytes
    text_offset: int  # characters of the choice's text before it
    logprob: float | None  # None: the first token of a prompt, which nothing predicts
    top: tuple[tuple[bytes, float], ...]


def logprob_entry(token_bytes: TokenBytes, entry: TokenLogprobs, offset: int) -> LogprobEntry:
    """What the engine reports of a token that has `offset` characters before it."""
    top = tuple((token_bytes(token_id), logprob) for token_id, logprob in entry.top)
    return LogprobEntry(token_bytes(entry.token_id), offset, entry.logprob, top)
