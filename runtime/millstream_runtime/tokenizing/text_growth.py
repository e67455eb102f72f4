"""How much text or tokens a tokenizer may make of what it is given, so that a short prompt cannot take a pod's memory.

A normalizer that replaces `a` by `aa`, forty times, makes a terabyte of one letter. So

- each step of a normalizer has a bound that follows from what it is (`normalizer_bound`), and one beyond MAX_GROWTH is
  refused; together they are measured at load on short probes, one step after another, and stop at the first step
  behind which a probe is more than MAX_GROWTH times as long;
- a pattern may match what no probe has, or only within a long text. So where the product of the bounds allows more than
  MAX_NORMALIZED_BYTES for a prompt, the whole prompt is measured before it is normalized, one step after another: what
  a step would make is known before it makes it (`normalizer_steps`);
- the library normalizes added tokens while it reads the file: those are measured, too, before it does;
- pre-tokenizers, decoders and post-processors have no pattern in common with prompts: the product of their bounds is
  their growth, and counts.

NFKC makes eleven times as many bytes of U+FDFA, and no published normalizer makes more of any character. All figures
are in bytes of UTF-8.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.rust_panics import RustPanic, tokenizers_errors
from millstream_runtime.tokenizing.normalizer_steps import NormalizerStep, StepTooLong, utf8_bytes
from millstream_runtime.tokenizing.tokenizer_parts import AddedText, Step, TokenizerParts, one_line, pieces

MAX_GROWTH = 16
MAX_NORMALIZED_BYTES = 16 << 20  # of one prompt: twice the largest request
MAX_ADDED_TOKENS = 1024  # that a post-processor puts around a prompt
MAX_TOKEN_CHARACTERS = 16 << 10  # of one token, which an answer may repeat; published ones have less than a thousand
LONGEST_UTF8_BYTES = 4  # of one character
MAX_PROBE_BYTES = 64  # a step makes at most MAX_GROWTH times this of a probe, however it is made
MAX_MAPPED_BYTES = (
    MAX_GROWTH * 3
)  # to which a precompiled map may map characters of three bytes; shorter ones are probed

# Characters that normal forms, case folding and Bert's spaces lengthen the most, and what published patterns look for.
PROBES = (
    *(chr(code_point) for code_point in range(1, 128)),
    *("\ufdfa", "\ufdfb", "\ufdf2", "\u3300", "\u33ff", "\ufb03", "\u2057", "\u1f82", "\u0390", "\u01d6"),
    *("\uac01", "\U0001d160", "\U0001d15e", "\u0130", "\u023a", "\u4e2d", "\u00e9", "\u0e33", "\U0001f680", "\u2581"),
    *("  ", "   ", "``", "''", "...", "\r\n", "a b", "Hello 1."),
)
TWO_BYTES = tuple(chr(code_point) for code_point in range(0x80, 0x800))  # all characters of two bytes

# Bytes that a step makes of one byte, at the most. Normal forms: unicode.org/faq/normalization.
NORMALIZER_BOUNDS: Mapping[str, float] = {
    **dict.fromkeys(("NFC", "NFD"), 3),
    **dict.fromkeys(("NFKC", "NFKD"), 11),
    "Lowercase": 1.5,  # U+0130, U+023A
    "BertNormalizer": 3 * 1.5 * 2,  # NFD, lower case, spaces around Chinese characters
    "ByteLevel": 2,  # a byte is one of the first 512 characters
    **dict.fromkeys(("Nmt", "Strip", "StripAccents"), 1),
}
PRE_TOKENIZER_BOUNDS: Mapping[str, float] = dict.fromkeys(
    (
        *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split"),
        *("UnicodeScripts", "Whitespace", "WhitespaceSplit"),
    ),
    1,
)
DECODER_BOUNDS: Mapping[str, float] = {
    **dict.fromkeys(("BPEDecoder", "CTC"), 3),  # a space per character
    "WordPiece": 2,  # a space per token
    "ByteLevel": 3,  # U+FFFD for a byte that is no character
    **dict.fromkeys(("ByteFallback", "Fuse", "Metaspace", "Strip"), 1),
}
POST_PROCESSORS = ("BertProcessing", "ByteLevel", "RobertaProcessing")  # they put at most four tokens around a prompt


class GrowthRefused(Exception):
    """The tokenizer makes too much of too little. `str()` says which part, in one line without a full stop."""


class TextTooLong(RuntimeFailure):
    """The normalizer makes more of this text than MAX_GROWTH or MAX_NORMALIZED_BYTES allows."""

    def __init__(self, limit: str) -> None:
        super().__init__(
            FailureReason.CHECKPOINT_INVALID,
            f"The model's tokenizer makes more than {limit} of this text before it cuts it into tokens; shorten it.",
        )


class NormalizedLength:
    """Measures what normalizers make of a text, one step at a time."""

    def __init__(self, steps: Sequence[Step], added_tokens: Sequence[AddedText] = ()) -> None:
        """Raises GrowthRefused: a step makes too much of too little, or cannot be made."""
        self._names = [str(step["type"]) for step in steps]
        self._bound = math.prod(normalizer_bound(step) for step in steps)
        self._added_tokens = added_tokens
        try:
            self._steps = [NormalizerStep(step) for step in steps]
        except RustPanic as panic:
            raise GrowthRefused(f"its normalizer cannot be made: {one_line(panic.detail)}") from panic

    def require(self, text: str) -> None:
        """Raises TextTooLong; costs nothing for a text that is short for the bounds of the steps."""
        width_bytes = 1 if text.isascii() else LONGEST_UTF8_BYTES
        if not self._steps or width_bytes * len(text) * self._bound <= MAX_NORMALIZED_BYTES:
            return
        left_bytes = limit_bytes = min(MAX_GROWTH * utf8_bytes(text), MAX_NORMALIZED_BYTES)
        try:
            for piece in pieces(text, self._added_tokens):
                left_bytes -= self._measured(piece, left_bytes)
        except StepTooLong:
            is_largest = limit_bytes == MAX_NORMALIZED_BYTES
            limit = f"{MAX_NORMALIZED_BYTES >> 20} MiB" if is_largest else f"{MAX_GROWTH} times as many bytes"
            raise TextTooLong(limit) from None

    def probe(self, probes: Iterable[str], what: str = "") -> None:
        """Raises GrowthRefused: a probe grows too much, or the library fails on it. `what`: of the probes."""
        for probe in probes:
            shown = f"{what}{probe[:MAX_PROBE_BYTES]!r}"
            try:
                self._measured(probe, MAX_GROWTH * utf8_bytes(probe))
            except StepTooLong:
                raise GrowthRefused(
                    f"its normalizer ({', '.join(self._names)[:100]}) makes more than {MAX_GROWTH} times as many bytes "
                    f"of {shown}"
                ) from None
            except RustPanic as panic:
                raise GrowthRefused(f"its normalizer fails on {shown}: {one_line(panic.detail)}") from panic

    def probe_tokens(self, added_tokens: Sequence[AddedText]) -> None:
        """The same of the added tokens that the library normalizes while it reads them."""
        if self._bound > MAX_GROWTH:
            self.probe((token.content for token in added_tokens if token.normalized), "the added token ")

    @tokenizers_errors
    def _measured(self, text: str, limit_bytes: int) -> int:
        """Bytes of the normalized text. No step makes more than `limit_bytes`; raises StepTooLong: it would."""
        for step in self._steps:
            text = step.applied(text, limit_bytes)
        return utf8_bytes(text)


def check_growth(parts: TokenizerParts) -> NormalizedLength:
    """Check each part, and return what bounds the texts of requests.

    Raises:
        GrowthRefused: a part makes too much of too little.
    """
    _require("pre-tokenizer", (pre_tokenizer_bound(step) for step in parts.pre_tokenizers))
    _require("decoder", (decoder_bound(step) for step in parts.decoders))
    _require("post-processor", (_copies(step) for step in parts.post_processors))
    if (added := sum(_added_tokens(step) for step in parts.post_processors)) > MAX_ADDED_TOKENS:
        raise GrowthRefused(f"its post-processor adds {added} tokens to each prompt; at most {MAX_ADDED_TOKENS} may be")
    length = NormalizedLength(parts.normalizers, parts.added_tokens)
    if parts.normalizers:
        has_map = any(step["type"] == "Precompiled" for step in parts.normalizers)
        length.probe(itertools.chain(PROBES, TWO_BYTES if has_map else (), _patterns(parts.normalizers)))
        length.probe_tokens(parts.added_tokens)
    return length


def check_tokens(longest_characters: int) -> None:
    """Raises GrowthRefused: a token is so long that few of them make a huge answer."""
    if longest_characters > MAX_TOKEN_CHARACTERS:
        raise GrowthRefused(f"a token has {longest_characters} characters; at most {MAX_TOKEN_CHARACTERS} may be")


def normalizer_bound(step: Step) -> float:
    """Bytes that one step makes of one byte, at the most.

    Raises:
        GrowthRefused: it makes more than any published one, or its type is not known.
    """
    kind = step["type"]
    if kind == "Prepend":
        return _checked(step, 1 + utf8_bytes(step["prepend"]))  # once per piece between added tokens
    if kind == "Replace":
        return _checked(step, _replaced(step))
    if kind == "Precompiled":
        return _longest_mapped_bytes(step)
    return _known(step, NORMALIZER_BOUNDS, "normalizer")


def pre_tokenizer_bound(step: Step) -> float:
    """Bytes that one step makes of one byte of a piece, at the most. Raises GrowthRefused: its type is not known."""
    if step["type"] == "ByteLevel":
        return 3 if step.get("add_prefix_space", True) else 2
    if step["type"] == "Metaspace":
        return 1 + utf8_bytes(step["replacement"])
    return _known(step, PRE_TOKENIZER_BOUNDS, "pre-tokenizer")


def decoder_bound(step: Step) -> float:
    """Bytes that one step makes of one byte of a token, at the most. Raises GrowthRefused: its type is not known."""
    return _replaced(step) if step["type"] == "Replace" else _known(step, DECODER_BOUNDS, "decoder")


def _replaced(step: Step) -> float:
    """A text is as long as the pattern that matches it; a regular expression may match nothing, around a character."""
    content_bytes = utf8_bytes(step["content"])
    pattern = str(step["pattern"].get("String", ""))
    if pattern:
        return max(1.0, content_bytes / utf8_bytes(pattern))
    return 1.0 + 2 * content_bytes


def _longest_mapped_bytes(step: Step) -> float:
    """The longest text to which a precompiled map maps a character.

    Its format is that of SentencePiece: the size of a trie in four bytes, the trie, and texts that end with a zero.
    """
    content = base64.b64decode(step["precompiled_charsmap"])
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    longest_bytes = max(map(len, texts.split(b"\0")), default=1)
    if longest_bytes > MAX_MAPPED_BYTES:
        raise GrowthRefused(
            f"its normalizer (Precompiled) maps a character to {longest_bytes} bytes; at most {MAX_MAPPED_BYTES} may be"
        )
    return max(1, longest_bytes)


def _copies(step: Step) -> float:
    """How often a post-processor repeats a prompt."""
    if step["type"] != "TemplateProcessing":
        return _known(step, dict.fromkeys(POST_PROCESSORS, 1.0), "post-processor")
    copies: list[float] = [
        sum(piece.get("Sequence", {}).get("id") == name for piece in step[template])
        for template in ("single", "pair")
        for name in ("A", "B")
    ]
    return max(1, *copies)


def _added_tokens(step: Step) -> int:
    if step["type"] != "TemplateProcessing":
        return LONGEST_UTF8_BYTES
    sizes = {name: len(special["ids"]) for name, special in step["special_tokens"].items()}
    named = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
    return sum(sizes.get(name, 0) for name in named)


def _require(part: str, bounds: Iterator[float]) -> None:
    growth = math.prod(bounds)
    if growth > MAX_GROWTH:
        raise GrowthRefused(f"its {part} can make {growth:.0f} times as much as it gets; at most {MAX_GROWTH} may be")


def _checked(step: Step, bound: float) -> float:
    if bound > MAX_GROWTH:
        raise GrowthRefused(
            f"its normalizer ({step['type']}) can make {bound:.0f} bytes of one; at most {MAX_GROWTH} may be"
        )
    return bound


def _known(step: Step, bounds: Mapping[str, float], part: str) -> float:
    if (bound := bounds.get(step["type"])) is None:
        raise GrowthRefused(f"its {part} has a step of the type {step['type']!r:.80}, which this version does not know")
    return bound


def _patterns(steps: Sequence[Step]) -> Iterator[str]:
    """Probes that the patterns of these steps match: the patterns that are text, and what they are replaced by."""
    for step in steps:
        for text in (step.get("pattern", {}).get("String", ""), step.get("content", ""), step.get("prepend", "")):
            if 0 < utf8_bytes(text) <= MAX_PROBE_BYTES:
                yield text
