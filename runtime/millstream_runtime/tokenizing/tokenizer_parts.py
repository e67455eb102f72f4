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
from tokenizers import Tokenizer as FastTokenizer

from millstream_runtime.rust_panics import RustPanic, panics_as_errors

MAX_STEPS = 256  # of one part; published tokenizers have at most nine
MAX_DETAIL_CHARACTERS = 300
MODEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}  # stands in for the model, which is not needed here
Step = Mapping[str, Any]


class TokenizerPartsError(Exception):
    """The file is not a tokenizer. `str()` says why, in one line without a full stop."""


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _Fields(msgspec.Struct):
    """The parts of a tokenizer.json, not decoded, and of its model what is checked; all else is skipped."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")
    model: _Model = msgspec.field(default_factory=_Model)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The steps of each part, in their order, each as the library writes it (`{"type": "NFC"}`)."""

    normalizers: Sequence[Step] = ()
    pre_tokenizers: Sequence[Step] = ()
    post_processors: Sequence[Step] = ()
    decoders: Sequence[Step] = ()


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
    )


def one_normalizer(step: Step) -> Any:
    """The library's normalizer for one step.

    Raises:
        RustPanic: the library cannot make it.
    """
    return stand_in(_Fields(normalizer=msgspec.Raw(msgspec.json.encode(step)))).normalizer


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
