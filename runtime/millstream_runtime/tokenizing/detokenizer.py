"""Incremental detokenisation: token ids in, complete characters out.

A character may be spread over several tokens (a byte-level vocabulary spells an emoji in up to four), so text
leaves here only when it can no longer change:

    ids      240 159 152 128 33          bytes of "😀!" as byte-level tokens
    push     ""  ""  ""  "😀" "!"

Two ways, chosen from the tokenizer's decoder:
  - byte-level vocabularies (GPT-2, Llama 3, Qwen): every token is a fixed run of bytes, so Python's incremental
    UTF-8 decoder does the work exactly, in O(1) per token;
  - everything else (SentencePiece with byte fallback): decode a short window twice, with and without the new
    token, and emit the difference (the method of Hugging Face TGI, also vLLM's slow path).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.rust_panics import panics_as_errors
from millstream_runtime.tokenizing.tokenizer_parts import Step

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so a longer run of undecodable tokens is not a character in the making.
MAX_TOKENS_HELD_BACK = 4


class Detokenizer(Protocol):
    """State of one generation."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token, often "" and never a part of a character.

        Raises:
            RustPanic: the library fails on the tokens so far.
        """

    def finish(self) -> str:
        """Text still held back that is whole; an unfinished character at the very end is dropped."""


class ByteLevelVocabulary:
    """Bytes of every token, shared by all generations. Special tokens have none: they are not text."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of_character = {character: byte for byte, character in enumerate(byte_level_alphabet())}
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """b"" for special tokens and for ids past the vocabulary (a padded embedding can produce them)."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        try:
            return bytes(self._byte_of_character[character] for character in token)
        except KeyError:  # an added token, stored as plain text
            return token.encode()


class ByteLevelDetokenizer:
    """Exact for byte-level vocabularies."""

    def __init__(self, vocabulary: ByteLevelVocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def finish(self) -> str:
        return ""  # what the decoder still holds is an unfinished character


class WindowDetokenizer:
    """For any decoder. Costs per token two decodes of the few tokens since the last emitted text."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # tokens whose text the next token may still join
        self._emitted = 0  # how many of them are already emitted

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._decode(self._window[: self._emitted])
        after = self._decode(self._window)
        held_back = len(self._window) - self._emitted
        if after == before and held_back > MAX_TOKENS_HELD_BACK:
            self._window.pop()  # a run of special tokens has no text: the window must not grow with it
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and held_back < MAX_TOKENS_HELD_BACK):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        before = self._decode(self._window[: self._emitted])
        return self._decode(self._window)[len(before) :].rstrip(REPLACEMENT)

    def _decode(self, token_ids: list[int]) -> str:
        with panics_as_errors:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def is_byte_level(decoders: Sequence[Step]) -> bool:
    """True when the whole decoder is ByteLevel, so that a token's bytes never depend on its neighbours."""
    return [step["type"] for step in decoders] == ["ByteLevel"]


def byte_level_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary, in byte order.

    Printable Latin-1 stands for itself; the other 68 bytes take the code points from 256 upwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, next_code_point = [], 256
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(next_code_point))
            next_code_point += 1
    return characters
