"""A token as the files of a model folder spell it: a string, or an object with the string in `content`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream_runtime.tokenizing.folder.files import invalid

FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
MAX_TOKEN_CHARACTERS = 16 << 10  # published ones have less than a thousand


@dataclass(frozen=True, slots=True)
class Token:
    """An added token. `special`: no text of an answer. The other flags are those of the `tokenizers` library."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True


def special_token(content: str) -> Token:
    """What a string means where special tokens stand."""
    return Token(content, special=True, normalized=False)


def read_token(value: object, file: str, field: str, *, special: bool = False) -> Token:
    """Read a token. `special`: what it is where the object does not say.

    Raises:
        RuntimeFailure: CheckpointInvalid, naming file and field.
    """
    if isinstance(value, str):
        return _checked(Token(value, special=special, normalized=not special), file, field)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise wrong(file, field, value, 'a text, or an object with a text in "content"')
    flags: dict[str, Any] = {name: value[name] for name in FLAGS if value.get(name) is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise wrong(file, f"{field}.{name}", flag, "true or false")
    flags.setdefault("special", special)
    flags.setdefault("normalized", not flags["special"])
    return _checked(Token(value["content"], **flags), file, field)


def wrong(file: str, field: str, value: object, expected: str) -> Exception:
    """The failure that a field of a file is something else than expected."""
    return invalid(f"{file}: {field} is {value!r:.80}; it must be {expected}.")


def _checked(token: Token, file: str, field: str) -> Token:
    if len(token.content) > MAX_TOKEN_CHARACTERS:
        raise invalid(
            f"{file}: {field} has a token of {len(token.content)} characters; at most {MAX_TOKEN_CHARACTERS} may be."
        )
    return token
