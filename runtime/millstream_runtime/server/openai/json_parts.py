"""JSON in parts: a document of 100 MB is sent without being copied, and other clients are served between its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class EncodedList:
    """A list whose items are encoded already. `groups`: each has some of them, with commas between."""

    groups: Sequence[bytes]


def json_parts(value: Any) -> list[bytes]:
    """Encode `value`, in which an EncodedList may stand for a list; joined, the parts are the document.

    A part is a group of an EncodedList, or what lies between two of them.
    """
    parts: list[bytes] = []
    between: list[bytes] = []
    for piece, is_group in _pieces(value):
        if is_group:
            parts += [b"".join(between), piece]
            between.clear()
        else:
            between.append(piece)
    return [*parts, b"".join(between)]


def _pieces(value: Any) -> Iterator[tuple[bytes, bool]]:
    """Pieces of the document, and whether they are groups."""
    match value:
        case EncodedList(groups):
            yield b"[", False
            for number, group in enumerate(groups):
                if number:
                    yield b",", False
                yield group, True
            yield b"]", False
        case dict():
            for number, (key, item) in enumerate(value.items()):
                yield b"%b%b:" % (b"," if number else b"{", _encoder.encode(key)), False
                yield from _pieces(item)
            yield b"}" if value else b"{}", False
        case list():
            yield b"[", False
            for number, item in enumerate(value):
                if number:
                    yield b",", False
                yield from _pieces(item)
            yield b"]", False
        case _:
            yield _encoder.encode(value), False
