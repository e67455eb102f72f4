"""Check that a model's support file is what its name says, before the folder keeps it.

    *.json                           JSON in UTF-8
    *.jinja, *.tiktoken, *.txt       text in UTF-8
    tokenizer.model, spiece.model    SentencePiece's protobuf, or lines of a token in base64 and its rank (tiktoken)

A shared library under such a name would lie where a variable of the environment could name it. Nothing here loads a
file: it is read in pieces, or where the kernel maps it, so the check takes little memory whatever the file's size.
"""

from __future__ import annotations

import codecs
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from millstream_runtime.sources.safetensors_header import LFS_POINTER
from millstream_runtime.sources.selection import invalid

PIECE_BYTES = 1 << 20
LENIENT_JSON_BYTES = 8 << 20  # up to here `NaN`, `Infinity` and a byte order mark are taken, as by Python's `json`
MAX_SENTENCEPIECE_BYTES = 64 << 20  # the largest in use has a tenth of this
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n?")
MAX_LINE_BYTES = 1 << 16

# sentencepiece_model.proto: ModelProto has pieces, and up to four messages about them; extensions begin at 200.
VARINT, FIXED_64, LENGTH_DELIMITED, FIXED_32 = 0, 1, 2, 5
FIRST_EXTENSION = 200
MODEL_FIELDS = dict.fromkeys(range(1, 6), LENGTH_DELIMITED)
PIECES = 1
PIECE_FIELDS = {1: LENGTH_DELIMITED, 2: FIXED_32, 3: VARINT}  # its text, score and type
TEXT = 1


class _WrongContentError(Exception):
    """The file is not what its name says. `str()`: why, as a part of a sentence."""


def check_support_file(path: Path, name: str, where: str) -> None:
    """Read the file at `path`, which the model calls `name`. `where`: the repository, image or artifact.

    Raises:
        RuntimeFailure: CheckpointInvalid; it names the file, the source and what is wrong.
    """
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise invalid(f"{where}: {name} is a git-lfs pointer, not the file; upload it with LFS.")
    kind = _kind_of(name)
    try:
        if kind == "JSON":
            _check_json(path)
        elif kind == "text in UTF-8":
            _check_text(path)
        else:
            _check_sentencepiece(path)
    except _WrongContentError as wrong:
        raise invalid(
            f"{where}: {name} is not {kind}, as its name says ({wrong}); nothing of it is kept. Upload the right file, "
            "or remove it if the model does not need it."
        ) from None


def _kind_of(name: str) -> str:
    if name.endswith(".json"):
        return "JSON"
    return "SentencePiece's protobuf" if name.endswith(".model") else "text in UTF-8"


def _check_text(path: Path) -> None:
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            try:
                text = decoder.decode(data)
            except UnicodeDecodeError as error:
                raise _WrongContentError(f"no UTF-8 near byte {position + error.start}") from None
            if "\0" in text:
                raise _WrongContentError(f"a zero byte near byte {position + data.find(0)}")
            position += len(data)
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise _WrongContentError("it ends within a character") from None


def _check_json(path: Path) -> None:
    """Accept what is valid; a small file may have what Python's `json` writes beyond the standard."""
    import msgspec  # here: most commands need it not

    _check_text(path)
    size_bytes = path.stat().st_size
    if not size_bytes:
        raise _WrongContentError("it is empty")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            msgspec.json.decode(content, type=msgspec.Raw)  # skips over values, and makes none
    except RecursionError:
        raise _WrongContentError("its lists or objects are nested too deeply") from None
    except msgspec.DecodeError as error:
        if size_bytes > LENIENT_JSON_BYTES or not _is_json_for_python(path):
            raise _WrongContentError(str(error)) from None


def _is_json_for_python(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _check_sentencepiece(path: Path) -> None:
    size_bytes = path.stat().st_size
    if not size_bytes:
        raise _WrongContentError("it is empty")
    if size_bytes > MAX_SENTENCEPIECE_BYTES:
        raise _WrongContentError(f"it has {size_bytes} bytes, and at most {MAX_SENTENCEPIECE_BYTES} are read")
    try:
        _check_model_proto(path.read_bytes())
    except _WrongContentError:
        if not _has_tiktoken_lines(path):
            raise


def _check_model_proto(data: bytes) -> None:
    pieces = 0
    for number, start, end in _fields(data, 0, len(data), MODEL_FIELDS):
        if number != PIECES:
            continue
        texts = [(first, last) for field, first, last in _fields(data, start, end, PIECE_FIELDS) if field == TEXT]
        try:
            if not texts:
                raise _WrongContentError(f"a piece without a text at byte {start}")
            for first, last in texts:
                str(data[first:last], "utf-8")
        except UnicodeDecodeError:
            raise _WrongContentError(f"a piece that is no UTF-8 at byte {start}") from None
        pieces += 1
    if not pieces:
        raise _WrongContentError("it has no pieces")


def _fields(data: bytes, position: int, end: int, known: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a message, where its value begins and where it ends.

    `known`: number -> wire type. Extensions have any.

    Raises:
        _WrongContentError: not the wire format, or a field that the message has not.
    """
    while position < end:
        at = position
        tag, position = _varint(data, position, end)
        number, wire_type = tag >> 3, tag & 7
        if known.get(number, wire_type if number >= FIRST_EXTENSION else None) != wire_type:
            raise _WrongContentError(f"no field of it at byte {at}")
        start = position
        if wire_type == VARINT:
            _, position = _varint(data, position, end)
        elif wire_type == LENGTH_DELIMITED:
            length, start = _varint(data, position, end)
            position = start + length
        elif wire_type in (FIXED_32, FIXED_64):
            position += 4 if wire_type == FIXED_32 else 8
        else:
            raise _WrongContentError(f"no field of it at byte {at}")
        if position > end:
            raise _WrongContentError(f"it ends within the field at byte {at}")
        yield number, start, position


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Return an integer of at most 64 bits, and where it ends."""
    value = 0
    for shift in range(0, 64, 7):
        if position >= end:
            raise _WrongContentError("it ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _WrongContentError(f"a number of more than 64 bits at byte {position}")


def _has_tiktoken_lines(path: Path) -> bool:
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        return all(TIKTOKEN_LINE.fullmatch(line) or not line.strip() for line in lines)
