"""The beginning of a GGUF file: metadata, and where each tensor lies.

    "GGUF" | version | number of tensors | number of fields | fields | tensors | padding | data

    field     name, type, value                       numbers, texts, and lists of one type
    tensor    name, dimensions (fastest first), type, offset in the data

All little-endian (ggml/docs/gguf.md). The file is untrusted: every count and length has a limit, every tensor must lie
within the file, and each failure names the field or the tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.block_types import BLOCK_TYPES, BY_NUMBER, OTHER_NAMES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
PIECE_BYTES = 1 << 20
MAX_GGUF_HEADER_BYTES = 64 << 20  # a vocabulary of 260,000 tokens takes 8 MB
MAX_FIELDS, MAX_TENSORS = 4096, 1 << 16
MAX_NAME_BYTES, MAX_TEXT_BYTES = 256, 1 << 20
MAX_ITEMS = 1 << 22  # of all lists together
MAX_DIMENSIONS, MAX_DIMENSION = 4, 1 << 31
MAX_ELEMENTS = 1 << 42
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
_TEXT, _LIST = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Read = Callable[[int], bytes]  # the next bytes, at most so many; none at the end


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` as torch has it, outputs first. `offset_bytes`: from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset_bytes: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """One file. `where`: its name, for messages. `num_bytes`: of the header itself."""

    where: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    num_bytes: int


def read_gguf_file(path: Path) -> GgufHeader:
    """Raises RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming field or tensor."""
    try:
        with path.open("rb") as file:
            return parse_gguf(file.read, path.stat().st_size, str(path))
    except OSError as error:
        raise invalid_gguf(str(path), f"cannot be read: {error.strerror}") from None


def parse_gguf(read: Read, file_bytes: int, where: str) -> GgufHeader:
    """As `read_gguf_file`, from wherever `read` gets the bytes."""
    source = _Bytes(read, where)
    num_tensors, num_fields = _start(source, file_bytes)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        name = source.name("the name of a field")
        if name in metadata:
            raise invalid_gguf(where, f"has the field {name} twice")
        metadata[name] = source.value(f"field {name}")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise invalid_gguf(where, f"has field general.alignment {alignment!r:.40}; it must be a power of two from 8 on")
    described = [_tensor_of(source) for _ in range(num_tensors)]
    start = -(-source.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for one in described:
        if one.name in tensors:
            raise invalid_gguf(where, f"has tensor {one.name} twice")
        if one.offset_bytes % alignment:
            raise invalid_gguf(where, f"has tensor {one.name} at offset {one.offset_bytes}, no multiple of {alignment}")
        end = start + one.offset_bytes + one.num_bytes
        if end > file_bytes:
            raise invalid_gguf(where, f"is cut: tensor {one.name} ends at byte {end} of {file_bytes}")
        tensors[one.name] = GgufTensor(one.name, one.shape, one.type, start + one.offset_bytes, one.num_bytes)
    return GgufHeader(where, metadata, tensors, source.position)


def invalid_gguf(where: str, what: str) -> RuntimeFailure:
    """The failure of a file that another reading does not repair."""
    return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{where} {what}; fetch or convert the file again.")


def _start(source: _Bytes, file_bytes: int) -> tuple[int, int]:
    """Numbers of tensors and of fields."""
    where = source.where
    magic = source.take(4, "its first bytes")
    if magic == b"vers":
        raise invalid_gguf(where, "is a git-lfs pointer, not the weights")
    if magic != MAGIC:
        raise invalid_gguf(where, f"({file_bytes} bytes) is no GGUF file: it begins with {magic!r}")
    version = source.number("I", "version")
    if version not in VERSIONS:
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"{where} is GGUF version {version}; versions {' and '.join(map(str, VERSIONS))}, little-endian, are read.",
        )
    num_tensors, num_fields = source.number("Q", "tensor count"), source.number("Q", "field count")
    for what, found, most in (("tensors", num_tensors, MAX_TENSORS), ("fields", num_fields, MAX_FIELDS)):
        if found > most:
            raise invalid_gguf(where, f"says that it has {found} {what}; at most {most} are read")
    return num_tensors, num_fields


def _tensor_of(source: _Bytes) -> GgufTensor:
    """With its offset in the data."""
    name = source.name("the name of a tensor")
    what = f"tensor {name}"
    num_dimensions = source.number("I", what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise invalid_gguf(source.where, f"has {what} of {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are read")
    sizes = [source.number("Q", what) for _ in range(num_dimensions)]
    number, offset = source.number("I", what), source.number("Q", what)
    shape = tuple(reversed(sizes))
    if not all(0 < size < MAX_DIMENSION for size in sizes) or math.prod(sizes) > MAX_ELEMENTS:
        raise invalid_gguf(source.where, f"has {what} of shape {list(shape)}, which no tensor has")
    if number not in BY_NUMBER:
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"{source.where}: {what} is {OTHER_NAMES.get(number, f'of type {number}')}, which is not supported by this "
            f"runtime; supported: {', '.join(BLOCK_TYPES)}.",
        )
    kind = BY_NUMBER[number]
    if sizes[0] % kind.block_elements:
        raise invalid_gguf(
            source.where, f"has {what} with rows of {sizes[0]}, no multiple of the {kind.block_elements} of {kind.name}"
        )
    num_bytes = kind.row_bytes(sizes[0]) * math.prod(sizes[1:])
    return GgufTensor(name, shape, kind, offset, num_bytes)


class _Bytes:
    """The file from its beginning; never more than the limit."""

    def __init__(self, read: Read, where: str) -> None:
        self.where = where
        self.position = 0
        self._read = read
        self._num_items = 0
        self._buffer = bytearray()

    def take(self, length: int, what: str) -> bytes:
        end = self.position + length
        if end > MAX_GGUF_HEADER_BYTES:
            raise invalid_gguf(self.where, f"has more than {MAX_GGUF_HEADER_BYTES} bytes before its tensors, in {what}")
        while len(self._buffer) < end:
            data = self._read(min(PIECE_BYTES, MAX_GGUF_HEADER_BYTES - len(self._buffer)))
            if not data:
                raise invalid_gguf(self.where, f"ends after {len(self._buffer)} bytes, in {what}")
            self._buffer += data
        found = bytes(self._buffer[self.position : end])
        self.position = end
        return found

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def name(self, what: str) -> str:
        found = self.text(what, MAX_NAME_BYTES)
        if not found or not found.isprintable():
            raise invalid_gguf(self.where, f"has {found!r:.60} as {what}")
        return found

    def text(self, what: str, most_bytes: int = MAX_TEXT_BYTES) -> str:
        length = self.number("Q", what)
        if length > most_bytes:
            raise invalid_gguf(self.where, f"has a text of {length} bytes in {what}; at most {most_bytes} are read")
        return self.take(length, what).decode(errors="replace")

    def value(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind == _TEXT:
            return self.text(what)
        if kind == _LIST:
            return self._list(what)
        return self.number(self._form(kind, what), what)

    def _list(self, what: str) -> list[Any]:
        kind, length = self.number("I", what), self.number("Q", what)
        self._num_items += length
        if self._num_items > MAX_ITEMS:
            raise invalid_gguf(self.where, f"has {length} items in {what}; at most {MAX_ITEMS} are read in all lists")
        if kind == _TEXT:
            return [self.text(what) for _ in range(length)]
        form = self._form(kind, what)
        data = self.take(length * struct.calcsize(f"<{form}"), what)
        return list(struct.unpack(f"<{length}{form}", data))

    def _form(self, kind: int, what: str) -> str:
        if kind not in _NUMBERS:
            raise invalid_gguf(self.where, f"has a value of type {kind} in {what}, which GGUF does not know")
        return _NUMBERS[kind]
