"""Write a GGUF file: metadata, then tensors one by one, so that no more than one is in memory.

The layout is that of `gguf/header.py` (ggml/docs/gguf.md), version 3, little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.gguf.block_types import BlockType
from millstream_runtime.gguf.header import DEFAULT_ALIGNMENT, MAGIC, VERSIONS

_UINT32, _INT32, _FLOAT32, _BOOL, _TEXT, _LIST = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """`shape` as torch has it. `chunks` gives all bytes of the tensor."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @property
    def num_bytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.type.row_bytes(self.shape[-1])


def write_gguf_file(path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> None:
    """Write a file and flush it to the disk. The same values give the same bytes.

    Args:
        metadata: flags, whole numbers (32 bits, unsigned), decimals (float32), texts, and lists of numbers or texts.

    Raises:
        OSError: it cannot be written; what was written so far is left.
    """
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for name, value in metadata.items():
        head += _text(name) + _value(value)
    offset = 0
    for one in tensors:
        sizes = tuple(reversed(one.shape))
        head += _text(one.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        head += struct.pack("<IQ", one.type.number, offset)
        offset += _padded(one.num_bytes)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % DEFAULT_ALIGNMENT))
        for one in tensors:
            for chunk in one.chunks():
                file.write(chunk)
            file.write(bytes(_padded(one.num_bytes) - one.num_bytes))
        file.flush()
        os.fsync(file.fileno())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind, form = (_TEXT, "") if isinstance(value[0], str) else (_INT32, "i")
        items = b"".join(map(_text, value)) if kind == _TEXT else struct.pack(f"<{len(value)}{form}", *value)
        return struct.pack("<IIQ", _LIST, kind, len(value)) + items
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<I", _TEXT) + _text(value)
