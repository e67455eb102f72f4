"""The header of a safetensors file, which describes its tensors. Pure, except for `check_file`.

    8 bytes: n, little-endian | n bytes: JSON {name: {dtype, shape, data_offsets}, "__metadata__": …} | tensors

The format is public (safetensors, Hugging Face); its own library reads headers from whole local files only.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream_runtime.gguf.header import parse_gguf
from millstream_runtime.sources.selection import GGUF_SUFFIX, invalid

LENGTH_BYTES = 8
LFS_POINTER = b"version https://git-lfs"  # how such a file begins
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS, MAX_DTYPE_CHARACTERS = 64, 32
SIZE_LIMIT = 1 << 63  # a product of larger numbers takes hours
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(slots=True)
class WeightsSummary:
    """Tensors of one or more files, counted.

    `elements_by_dtype`: packed quantised values count as stored elements. `shapes`: of the tensors of safetensors.
    """

    files: int = 0
    tensors: int = 0
    tensor_bytes: int = 0
    file_bytes: int = 0
    elements_by_dtype: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_gguf: bool = False
    gguf_left_out: tuple[str, ...] = ()  # GGUF files in place of which *.safetensors are read

    def add(self, header: dict[str, Any], header_bytes: int, size_bytes: int, where: str) -> None:
        """Count one file's header. Raises RuntimeFailure: CheckpointInvalid, it does not fit the file."""
        data_bytes = size_bytes - LENGTH_BYTES - header_bytes
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end, elements = _measure(name, tensor, where)
            if end > data_bytes:
                raise invalid(
                    f"{where} is cut: tensor {name[:80]!r} ends at byte {end} of {data_bytes} that follow the header; "
                    "fetch the file again."
                )
            if name in self.names:
                raise invalid(f"{where} holds tensor {name[:80]!r}, which another file holds too.")
            self.names.add(name)
            self.shapes[name] = tuple(tensor["shape"])
            self.tensors += 1
            self.tensor_bytes += end - begin
            self.elements_by_dtype[tensor["dtype"]] += elements
        self.files += 1
        self.file_bytes += size_bytes


def header_length(first_bytes: bytes, size_bytes: int, where: str) -> int:
    """The length of the JSON. Raises RuntimeFailure: CheckpointInvalid."""
    if first_bytes.startswith(LFS_POINTER):
        raise invalid(f"{where} is a git-lfs pointer, not the weights; fetch it with LFS.")
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if len(first_bytes) < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
        raise invalid(f"{where} ({size_bytes} bytes) is not a safetensors file, or only the beginning of one.")
    return length


def parse_header(text: bytes, where: str) -> dict[str, Any]:
    """The JSON. Raises RuntimeFailure: CheckpointInvalid."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise invalid(f"{where} has a safetensors header that is not a JSON object.")
    return header


def check_file(path: Path, where: str) -> None:
    """Raises RuntimeFailure: CheckpointInvalid, the file of weights is not what its header describes."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if where.endswith(GGUF_SUFFIX):
            parse_gguf(file.read, size_bytes, where)
            return
        length = header_length(file.read(LENGTH_BYTES + 24)[: LENGTH_BYTES + 24], size_bytes, where)
        file.seek(LENGTH_BYTES)
        WeightsSummary().add(parse_header(file.read(length), where), length, size_bytes, where)


def _measure(name: str, tensor: Any, where: str) -> tuple[int, int, int]:
    """Begin and end offset in bytes, and the number of elements."""
    try:
        (begin, end), shape, dtype = tensor["data_offsets"], tensor["shape"], tensor["dtype"]
        bounded = len(shape) <= MAX_DIMENSIONS and len(dtype) <= MAX_DTYPE_CHARACTERS
        if isinstance(dtype, str) and bounded and all(map(_is_size, (begin, end, *shape))):
            elements = math.prod(shape)
            bits = BITS.get(dtype)  # None: a type newer than this file; then the size is taken as it is
            if begin <= end and (bits is None or (end - begin) * 8 == elements * bits):
                return begin, end, elements
    except (KeyError, TypeError, ValueError):
        pass
    raise invalid(
        f"{where} describes tensor {name[:80]!r} in a way that no safetensors file does: {str(tensor)[:120]}."
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < SIZE_LIMIT
