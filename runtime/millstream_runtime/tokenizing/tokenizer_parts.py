"""The parts of a tokenizer.json that change text or tokens, read without its vocabulary and before anything runs them.

    text ─▶ normalizers ─▶ pre-tokenizers ─▶ model ─▶ post-processors ─▶ ids        decoders: ids ─▶ text

The library itself must not read the whole file first: it normalizes the added tokens while it does so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.rust_panics import RustPanic, panics_as_errors, tokenizers_errors

MAX_STEPS = 256  # of one part; published tokenizers have at most nine
MAX_DETAIL_CHARACTERS = 300
MODEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}  # stands in for the model, which is not needed here
Step = Mapping[str, Any]


class TokenizerPartsError(Exception):
    """The file is not a tokenizer. `str()` says why, in one line without a full stop."""


class AddedText(msgspec.Struct, frozen=True):
    """A token that is cut out of a text before the model sees it; where `normalized` is False, before the normalizer.

    `lstrip`, `rstrip`: with the spaces beside it. `single_word`: only where no letter touches it.
    """

    content: str = ""
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _Fields(msgspec.Struct):
    """The parts of a tokenizer.json, not decoded, and of its model what is checked; all else is skipped."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")
    added_tokens: tuple[AddedText, ...] | None = ()
    model: _Model = msgspec.field(default_factory=_Model)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The steps of each part, in their order, each as the library writes it (`{"type": "NFC"}`)."""

    normalizers: Sequence[Step] = ()
    pre_tokenizers: Sequence[Step] = ()
    post_processors: Sequence[Step] = ()
    decoders: Sequence[Step] = ()
    added_tokens: Sequence[AddedText] = ()


def read_parts(content: bytes | str) -> TokenizerParts:
    """Read the parts of a tokenizer.json.

    The library takes older spellings, too, such as steps without a type. So it reads the parts, with a model that
    stands in for the file's, and writes them in the one spelling of today.

    Raises:
        TokenizerPartsError: it is not JSON, or the library cannot read a part.
    """
    try:
        fields = msgspec.json.decode(content, type=_Fields)
        _check_merges(fields.model)
        written = json.loads(stand_in(fields).to_str())
    except RustPanic as panic:
        raise TokenizerPartsError(one_line(panic.detail)) from panic
    except Exception as error:  # the library raises bare Exception for every parse error
        raise TokenizerPartsError(one_line(str(error))) from error
    return TokenizerParts(
        _steps(written["normalizer"], "normalizers"),
        _steps(written["pre_tokenizer"], "pretokenizers"),
        _steps(written["post_processor"], "processors"),
        _steps(written["decoder"], "decoders"),
        fields.added_tokens or (),
    )


def one_normalizer(step: Step) -> Any:
    """The library's normalizer for one step.

    Raises:
        RustPanic: the library cannot make it.
    """
    return stand_in(_Fields(normalizer=msgspec.Raw(msgspec.json.encode(step)))).normalizer


def one_decoder(step: Step) -> Any:
    """The library's decoder for one step.

    Raises:
        RustPanic: the library cannot make it.
    """
    return stand_in(_Fields(decoder=msgspec.Raw(msgspec.json.encode(step)))).decoder


@tokenizers_errors
def pieces(text: str, added_tokens: Sequence[AddedText]) -> list[str]:
    """What the library hands to the normalizer, one piece at a time: the text without tokens that it cuts out before.

    Raises:
        RustPanic: the library fails on it.
    """
    cut_out = [token for token in added_tokens if token.content and not token.normalized]
    if not cut_out:
        return [text]
    words = stand_in(_Fields())
    words.add_tokens(
        [
            AddedToken(
                token.content,
                normalized=False,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
            )
            for token in cut_out
        ]
    )
    encoded = words.encode(text)
    return [text[start:end] for number, (start, end) in zip(encoded.ids, encoded.offsets, strict=True) if number == 0]


@panics_as_errors
def stand_in(fields: _Fields) -> FastTokenizer:
    """A tokenizer with these parts and a vocabulary of one word, which has no added tokens to normalize."""
    parts = {name: getattr(fields, name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **parts, "model": MODEL}
    return FastTokenizer.from_str(msgspec.json.encode(whole).decode())


def one_line(text: str) -> str:
    """The first line of a library's message, without the full stop at its end."""
    return (text.splitlines() or ["no reason given"])[0].rstrip(".")[:MAX_DETAIL_CHARACTERS]


def _check_merges(model: _Model) -> None:
    """Refuse merges without the prefix that the library cuts off unseen, within a character: that ends the process."""
    prefix = model.continuing_subword_prefix
    if not prefix:
        return
    for merge in msgspec.json.decode(model.merges):
        right = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not right.startswith(prefix):
            raise ValueError(f"the merge {merge!r:.80} has no continuing_subword_prefix {prefix!r:.80}")


def _steps(part: Step | None, key: str) -> tuple[Step, ...]:
    """The steps of a part, those of sequences in sequences one after another. `key`: where a sequence has its steps."""
    if part is None:
        return ()
    steps = [part] if part["type"] != "Sequence" else [one for inner in part[key] for one in _steps(inner, key)]
    if len(steps) > MAX_STEPS:
        raise TokenizerPartsError(f"it has more than {MAX_STEPS} {key}")
    return tuple(steps)
