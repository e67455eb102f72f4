"""The prompt, returned before the answer, with the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream_runtime.engine.request import TokenLogprobs
from millstream_runtime.server.openai.logprob_entry import LogprobEntry, TokenBytes, logprob_entry
from millstream_runtime.tokenizing.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, shown before the answer."""

    text: str
    token_ids: Sequence[int]
    detokenizer: Detokenizer  # fresh: it says where in `text` each token begins


def echo_entries(echo: Echo, prompt: Sequence[TokenLogprobs | None], token_bytes: TokenBytes) -> Iterator[LogprobEntry]:
    """One entry per token of the echoed prompt, each made when it is asked for."""
    offsets = _offsets(echo, token_bytes)
    # Nothing predicts the first token, so the engine does not report it.
    yield LogprobEntry(token_bytes(echo.token_ids[0]), next(offsets), None, ())
    for number, offset in enumerate(offsets, start=1):
        entry = prompt[number]
        if entry is not None:
            yield logprob_entry(token_bytes, entry, offset)


def _offsets(echo: Echo, token_bytes: TokenBytes) -> Iterator[int]:
    """Characters of the echoed text before each of its tokens.

    A character of several tokens counts once, after the last of them. A special token counts where the prompt spells it
    out, and not where the tokenizer has put it around the prompt.
    """
    offset = pushed = named = 0  # characters: before a token, of text, of names of special tokens
    for token_id in echo.token_ids:
        yield offset
        pushed += len(echo.detokenizer.push(token_id))
        end = pushed + len(echo.detokenizer.pending()) + named
        if end == offset:
            name = token_bytes(token_id).decode(errors="ignore")
            shown = len(name) if echo.text.startswith(name, offset) else 0
            named, end = named + shown, end + shown
        offset = end
