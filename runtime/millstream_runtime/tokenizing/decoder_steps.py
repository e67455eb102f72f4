"""The steps of a tokenizer's decoder, each fed one token at a time: the text is that of decoding all tokens at once.

    "▁" "<0xF0>" "<0x9F>" "<0xA6>" "<0x99>" "h"     tokens of Llama 2
    Replace       " "  ..............................    ▁ is a space
    ByteFallback  " "  -    -    -    -    "🦙" "h"      bytes are a character, or one U+FFFD each
    Fuse, Strip   ""   -    -    -    -    "🦙" "h"      without the first space of the text

A step returns tokens that no later token can change and holds the others back. Behind `Fuse` and `ByteLevel` there is
one token, the whole text: `push` gets and returns pieces of it. What a step makes of a single token, the library says.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import Decoder

from millstream_runtime.rust_panics import tokenizers_errors
from millstream_runtime.tokenizing.tokenizer_parts import Step, one_decoder

REPLACEMENT = "\ufffd"
# The library's spelling of a byte: two hexadecimal digits, or one behind a plus, as Rust reads numbers.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
# Of whole characters spelled in bytes that are held back, because an invalid byte behind them would make each of their
# bytes one U+FFFD. Of a longer run, characters leave as they come: no client waits for a whole page of rare script.
MAX_UNDECIDED_BYTES = 64
CACHED_TOKENS = 1 << 16
ANY_WORD = "x"  # stands before a token that is not the first one
Convert = Callable[[str], str]


class DecoderStep(Protocol):
    """State of one generation. It is immutable, so that `copy.copy` keeps it."""

    def push(self, token: str) -> Sequence[str]:
        """Return tokens, or pieces of the text, that became final."""

    def finish(self) -> Sequence[str]:
        """Return what is held back, without an unfinished character, as if no token came after. It changes nothing."""


def decoder_steps(tokenizer: FastTokenizer, steps: Sequence[Step]) -> Sequence[DecoderStep]:
    """Return the decoder's steps at their beginning; copy them for each generation.

    `steps`: as `tokenizer_parts.read_parts` has them.
    """
    if tokenizer.decoder is None:
        return [_ByPlace(str, lambda token: f" {token}")]
    made: list[DecoderStep] = []
    is_text = False
    for step in steps:
        decoder = one_decoder(step)
        made.append(_of_text(step, decoder) if is_text else _of_tokens(step, decoder))
        is_text = is_text or step["type"] in ("Fuse", "ByteLevel")
    return made


def push_through(steps: Sequence[DecoderStep], token: str) -> str:
    """Return the text that became final with this token."""
    tokens: Sequence[str] = (token,)
    for step in steps:
        tokens = [made for one in tokens for made in step.push(one)]
    return "".join(tokens)


def finish_all(steps: Sequence[DecoderStep]) -> str:
    """Return the text that all steps held back."""
    tokens: list[str] = []
    for step in steps:
        tokens = [*(made for one in tokens for made in step.push(one)), *step.finish()]
    return "".join(tokens)


def copies(steps: Sequence[DecoderStep]) -> list[DecoderStep]:
    return [copy.copy(step) for step in steps]


def _of_tokens(step: Step, decoder: Decoder) -> DecoderStep:
    kind = step["type"]
    alone = _cached(partial(_decoded, decoder))
    if kind in ("Replace", "Strip"):
        return _EachToken(alone)
    if kind in ("Metaspace", "WordPiece"):
        return _ByPlace(alone, _cached(lambda token: _decoded(decoder, ANY_WORD, token).removeprefix(ANY_WORD)))
    if kind == "BPEDecoder":
        return _ByFollower(_cached(lambda token: _decoded(decoder, token, "")), alone)
    if kind == "CTC":
        return _WithoutRepeats(alone)
    if kind == "ByteFallback":
        return _ByteRuns()
    if kind == "ByteLevel":
        return _Bytes()
    if kind == "Fuse":
        return _EachToken(str)
    raise ValueError(f"the decoder {kind:.40} is unknown")


def _of_text(step: Step, decoder: Decoder) -> DecoderStep:
    """The step behind one that makes a single token of all."""
    kind = step["type"]
    if kind == "Fuse":
        return _EachToken(str)
    if kind == "Metaspace":  # it looks at one character at a time, all of the first token
        return _EachToken(partial(_decoded, decoder))
    if kind == "Replace" and (pattern := step["pattern"].get("String")):
        return _ReplacedInText(pattern, step["content"])
    if kind == "Strip":
        return _StrippedText(step["content"], step["start"], step["stop"])
    return _WholeText(partial(_decoded, decoder))


@tokenizers_errors
def _decoded(decoder: Decoder, *tokens: str) -> str:
    return str(decoder.decode(list(tokens)))


def _cached(convert: Convert) -> Convert:
    return lru_cache(CACHED_TOKENS)(convert)


class _EachToken:
    """A step that looks at one token alone."""

    def __init__(self, convert: Convert) -> None:
        self._convert = convert

    def push(self, token: str) -> Sequence[str]:
        return (self._convert(token),)

    def finish(self) -> Sequence[str]:
        return ()


class _ByPlace:
    """A step that treats the first token in another way: it has no space before it."""

    def __init__(self, first: Convert, other: Convert) -> None:
        self._first, self._other = first, other
        self._is_first = True

    def push(self, token: str) -> Sequence[str]:
        convert = self._first if self._is_first else self._other
        self._is_first = False
        return (convert(token),)

    def finish(self) -> Sequence[str]:
        return ()


class _ByFollower:
    """A step that treats the last token in another way: it has no space behind it."""

    def __init__(self, followed: Convert, last: Convert) -> None:
        self._followed, self._last = followed, last
        self._held: str | None = None

    def push(self, token: str) -> Sequence[str]:
        held, self._held = self._held, token
        return () if held is None else (self._followed(held),)

    def finish(self) -> Sequence[str]:
        return () if self._held is None else (self._last(self._held),)


class _WithoutRepeats:
    """CTC: of equal neighbours one is left, and empty ones are left out."""

    def __init__(self, convert: Convert) -> None:
        self._convert = convert
        self._previous: str | None = None

    def push(self, token: str) -> Sequence[str]:
        is_repeated, self._previous = token == self._previous, token
        converted = "" if is_repeated else self._convert(token)
        return (converted,) if converted else ()

    def finish(self) -> Sequence[str]:
        return ()


class _ByteRuns:
    """ByteFallback: neighbours that spell bytes are one text if it is valid UTF-8; else each is one U+FFFD."""

    def __init__(self) -> None:
        self._run = b""  # bytes that are held back
        self._is_long = False  # the run's first characters have left
        self._is_invalid = False

    def push(self, token: str) -> Sequence[str]:
        spelled = BYTE_TOKEN.fullmatch(token)
        if spelled is None:
            return (*self._ended(), token)
        self._run += bytes([int(spelled[1], 16)])
        if self._is_invalid:
            return self._replaced()
        try:
            text, num_bytes = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            self._is_invalid = True
            return self._replaced()
        if not self._is_long and num_bytes <= MAX_UNDECIDED_BYTES:
            return ()
        self._is_long = True
        self._run = self._run[num_bytes:]
        return (text,) if text else ()

    def finish(self) -> Sequence[str]:
        text, _ = codecs.utf_8_decode(self._run, "strict", False)
        return (text,) if text else ()

    def _replaced(self) -> Sequence[str]:
        count, self._run = len(self._run), b""
        return (REPLACEMENT,) * count

    def _ended(self) -> Sequence[str]:
        try:
            tokens: Sequence[str] = (self._run.decode(),) if self._run else ()
            self._run = b""
        except UnicodeDecodeError:
            tokens = self._replaced()
        self._is_long = self._is_invalid = False
        return tokens


class _Bytes:
    """ByteLevel: each token is a run of bytes, and all of them are one text."""

    def __init__(self) -> None:
        self._rest = b""  # of an unfinished character

    def push(self, token: str) -> Sequence[str]:
        spelled = self._rest + bytes_of_characters(token)
        text, num_bytes = codecs.utf_8_decode(spelled, "replace", False)
        self._rest = spelled[num_bytes:]
        return (text,) if text else ()

    def finish(self) -> Sequence[str]:
        return ()


class _ReplacedInText:
    """Replace, of a string in the whole text."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""  # the beginning of a pattern

    def push(self, piece: str) -> Sequence[str]:
        *whole, rest = (self._held + piece).split(self._pattern)
        longest = min(len(rest), len(self._pattern) - 1)
        kept = next((n for n in range(longest, 0, -1) if self._pattern.startswith(rest[len(rest) - n :])), 0)
        self._held = rest[len(rest) - kept :]
        text = self._content.join([*whole, rest[: len(rest) - kept]])
        return (text,) if text else ()

    def finish(self) -> Sequence[str]:
        return (self._held,) if self._held else ()


class _StrippedText:
    """Strip, at both ends of the whole text: at most `start` and `stop` times the character `content`."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = ""  # what may be cut off at the end

    def push(self, piece: str) -> Sequence[str]:
        stripped = piece.lstrip(self._content)
        cut = min(self._start, len(piece) - len(stripped))
        self._start = self._start - cut if not stripped else 0
        text = self._held + piece[cut:]
        length = len(text) - min(self._stop, len(text) - len(text.rstrip(self._content)))
        self._held = text[length:]
        return (text[:length],) if length else ()

    def finish(self) -> Sequence[str]:
        return ()


class _WholeText:
    """A step for which the whole text must be there, such as a regular expression."""

    def __init__(self, convert: Convert) -> None:
        self._convert = convert
        self._text = ""

    def push(self, piece: str) -> Sequence[str]:
        self._text += piece
        return ()

    def finish(self) -> Sequence[str]:
        return (self._convert(self._text),)


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


_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(byte_level_alphabet())}


def bytes_of_characters(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary spells."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # an added token, stored as plain text
        return token.encode()
