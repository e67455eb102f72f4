"""Write safetensors files tensor by tensor, and copy tensors between files without loading them.

The format's own library serialises a whole file in memory first, and reports a full disk as another kind of error.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millstream_runtime.sources.safetensors_header import LENGTH_BYTES, header_length, parse_header

CHUNK_BYTES = 8 << 20
ALIGNMENT_BYTES = 8
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ELEMENT_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """Where a tensor lies in a safetensors file."""

    path: Path
    offset_bytes: int
    num_bytes: int
    dtype: str  # as the format names it
    shape: tuple[int, ...]

    def chunks(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes)
            left = self.num_bytes
            while left and (chunk := file.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk
        if left:
            raise OSError(errno.EIO, f"{self.path} ends early")

    def load(self) -> Tensor:
        """The tensor in the file's dtype, in memory of its own."""
        return self._read(0, self.num_bytes).view(TORCH_DTYPES[self.dtype]).reshape(self.shape)

    def load_rows(self, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix, `[len(rows), columns]`; nothing else is read."""
        row_bytes = self.num_bytes // self.shape[0]
        found = [self._read(row * row_bytes, row_bytes) for row in rows]
        return torch.stack(found).view(TORCH_DTYPES[self.dtype])

    def _read(self, start_bytes: int, num_bytes: int) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes + start_bytes)
            if file.readinto(buffer.numpy().data) != num_bytes:
                raise OSError(errno.EIO, f"{self.path} ends early")
        return buffer


def tensors_of(path: Path) -> dict[str, TensorInFile]:
    """Return the tensors of a file by name; the file was checked before."""
    with path.open("rb") as file:
        length = header_length(file.read(LENGTH_BYTES + 24), path.stat().st_size, str(path))
        file.seek(LENGTH_BYTES)
        header = parse_header(file.read(length), str(path))
    found = {}
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            offset = LENGTH_BYTES + length + begin
            found[name] = TensorInFile(path, offset, end - begin, tensor["dtype"], tuple(tensor["shape"]))
    return found


def write_file(path: Path, tensors: Mapping[str, Tensor | TensorInFile]) -> None:
    """Write a file and flush it to the disk. The same tensors give the same bytes.

    Raises:
        OSError: it cannot be written; what was written so far is left.
    """
    names = sorted(tensors, key=lambda name: (-_element_bytes(tensors[name]), name))  # keeps each tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        one = tensors[name]
        dtype, num_bytes = _dtype(one), _num_bytes(one)
        header[name] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in names:
            one = tensors[name]
            for chunk in one.chunks() if isinstance(one, TensorInFile) else [_bytes(one)]:
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _dtype(one: Tensor | TensorInFile) -> str:
    return one.dtype if isinstance(one, TensorInFile) else DTYPE_NAMES[one.dtype]


def _num_bytes(one: Tensor | TensorInFile) -> int:
    return one.num_bytes if isinstance(one, TensorInFile) else one.numel() * one.element_size()


def _element_bytes(one: Tensor | TensorInFile) -> int:
    return ELEMENT_BYTES.get(_dtype(one), 1)
