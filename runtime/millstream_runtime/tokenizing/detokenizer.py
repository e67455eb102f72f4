"""Incremental detokenisation: token ids in, complete characters out.

A character may be spread over several tokens (a byte-level vocabulary spells an emoji in up to four), so text
leaves here only when it can no longer change:

    ids      240 159 152 128 33          bytes of "😀!" as byte-level tokens
    push     ""  ""  ""  "😀" "!"

Two ways, chosen from the tokenizer's decoder; the text of both is that of decoding all tokens at once:
  - byte-level vocabularies (GPT-2, Llama 3, Qwen): every token is a fixed run of bytes, so Python's incremental
    UTF-8 decoder does the work in O(1) per token;
  - everything else (SentencePiece with byte fallback, WordPiece): the decoder's steps one after another, each with what
    it must remember of earlier tokens (`decoder_steps`).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.tokenizing.decoder_steps import (
    DecoderStep,
    bytes_of_characters,
    copies,
    decoder_steps,
    finish_all,
    push_through,
)
from millstream_runtime.tokenizing.tokenizer_parts import Step


class Detokenizer(Protocol):
    """State of one generation."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token, often "" and never a part of a character.

        Raises:
            RustPanic: the library fails on the tokens so far.
        """

    def pending(self) -> str:
        """What `finish` would return now: whole characters that a later token may still change."""

    def finish(self) -> str:
        """Text still held back that is whole; an unfinished character at the very end is dropped."""


def _is_left_out(tokenizer: FastTokenizer, token_id: int) -> bool:
    """Whether the library leaves an added token out of a whole text.

    Two files of a folder may say differently whether it is special; the library keeps both answers, and decodes by the
    one that `get_added_tokens_decoder` does not show.
    """
    return not tokenizer.decode([token_id]) and bool(tokenizer.decode([token_id], skip_special_tokens=False))


class _Vocabulary:
    """Which tokens have text: no special ones, and no ids past the vocabulary, which a padded embedding can produce."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special or _is_left_out(tokenizer, token_id)
        )

    def token_of(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None: it has no text."""
        return None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)


class ByteLevelVocabulary:
    """Bytes of every token, shared by all generations. Special tokens have none: they are not text."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._vocabulary = _Vocabulary(tokenizer)
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """b"" for special tokens and for ids past the vocabulary."""
        known = self._cache.get(token_id)
        if known is None:
            token = self._vocabulary.token_of(token_id)
            known = self._cache[token_id] = b"" if token is None else bytes_of_characters(token)
        return known


class ByteLevelDetokenizer:
    """Exact for byte-level vocabularies."""

    def __init__(self, vocabulary: ByteLevelVocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return ""  # what the decoder still holds is an unfinished character


class StepwiseDecoder:
    """The vocabulary and the steps of a decoder, shared by all generations."""

    def __init__(self, tokenizer: FastTokenizer, steps: Sequence[Step]) -> None:
        """`steps`: the tokenizer's decoder, as `tokenizer_parts.read_parts` has it."""
        self.vocabulary = _Vocabulary(tokenizer)
        self._steps = decoder_steps(tokenizer, steps)

    def fresh_steps(self) -> list[DecoderStep]:
        return copies(self._steps)


class StepwiseDetokenizer:
    """For any decoder."""

    def __init__(self, decoder: StepwiseDecoder) -> None:
        self._vocabulary = decoder.vocabulary
        self._steps = decoder.fresh_steps()

    def push(self, token_id: int) -> str:
        token = self._vocabulary.token_of(token_id)
        return "" if token is None else push_through(self._steps, token)

    def pending(self) -> str:
        holds_text = any(step.finish() for step in self._steps)
        return finish_all(copies(self._steps)) if holds_text else ""

    def finish(self) -> str:
        return finish_all(self._steps)


def is_byte_level(decoders: Sequence[Step]) -> bool:
    """True when the whole decoder is ByteLevel, so that a token's bytes never depend on its neighbours."""
    return [step["type"] for step in decoders] == ["ByteLevel"]
