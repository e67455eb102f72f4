"""The ids of tokenizer.json, read without the `tokenizers` library: the engine needs one of them, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from millstream_runtime.tokenizing.folder.files import first_line, invalid
from millstream_runtime.tokenizing.folder.token import Token, read_token

FILE_NAME = "tokenizer.json"


class _Model(msgspec.Struct):
    type: str | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"")


class _Fields(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)
    added_tokens: list[dict[str, Any]] = []
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class VocabularyFile:
    """`ids`: of the model's own tokens. `added`: of the file's added tokens, by their ids.

    `added_by_class`: the file's added tokens where the tokenizer's class adds them anew, so that `added` has none.
    """

    ids: Mapping[str, int]
    added: Mapping[int, Token]
    is_byte_level: bool
    is_bpe: bool = True
    added_by_class: Mapping[int, Token] = field(default_factory=dict)

    def with_class(self) -> VocabularyFile:
        """The same where the tokenizer's class adds the file's added tokens anew."""
        return replace(self, added={}, added_by_class=self.added)

    def names(self, content: str) -> bool:
        """Whether the file has a token, added or not."""
        return self.id_of(content) is not None or any(
            token.content == content for token in self.added_by_class.values()
        )

    def id_of(self, content: str) -> int | None:
        """The id of a token, as the library finds it: of an added one first."""
        for number, token in self.added.items():
            if token.content == content:
                return number
        return self.ids.get(content)

    def ids_after(self, tokens: Sequence[Token]) -> dict[str, int]:
        """The ids that the library gives to these tokens, when they are added in this order."""
        known = dict(self.ids) | {token.content: number for number, token in self.added.items()}
        most = max(self.added, default=-1)
        ids: dict[str, int] = {}
        for token in tokens:
            number = known.get(token.content)
            if number is None:
                number = max(most + 1, len(self.ids))
            known[token.content] = ids[token.content] = number
            most = max(most, number)
        return ids


def parse_vocabulary(path: Path, content: bytes) -> VocabularyFile:
    """Parse the ids of a tokenizer.json.

    Raises:
        RuntimeFailure: CheckpointInvalid, it is not one.
    """
    try:
        fields = msgspec.json.decode(content, type=_Fields)
        vocabulary = msgspec.json.decode(fields.model.vocab, type=dict[str, int] | list[tuple[str, float]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"{path} is not a tokenizer: {first_line(error)}.") from error
    added: dict[int, Token] = {}
    for place, value in enumerate(fields.added_tokens):
        number, field = value.get("id"), f"added_tokens[{place}]"
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise invalid(f"{path} is not a tokenizer: {field}.id is {number!r:.40}; it must be a token's id.")
        added[number] = read_token(value, path.name, field)
    if isinstance(vocabulary, list):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    parts = (bytes(fields.pre_tokenizer), bytes(fields.decoder))
    is_byte_level = any(b'"ByteLevel"' in part for part in parts)
    return VocabularyFile(vocabulary, added, is_byte_level, _is_bpe(fields.model))


def _is_bpe(model: _Model) -> bool:
    """Whether it is BPE: the library reads a model without a type by its fields."""
    return model.type == "BPE" or (model.type is None and bytes(model.merges) != b"")
