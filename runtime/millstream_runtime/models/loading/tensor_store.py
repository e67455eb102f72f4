"""What a model is loaded from: named tensors, whatever the format of the files. See `open_checkpoint`.

The header of every file is read first: what is missing, misshapen, of the wrong type or cut off is named with its
file before any weight is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from millstream_runtime.errors import FailureReason, RuntimeFailure

DOCUMENT_LIMIT_BYTES = 1 << 14
FLOAT_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors' names, and bytes per element
DTYPE_BYTES = FLOAT_DTYPES | {"I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}

PACKED_NAMES = ("qweight", "weight_packed")  # of AWQ and GPTQ; of compressed-tensors


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """What a header says of a tensor."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


class TensorStore(ABC):
    """The tensors of a model folder by name. Use as a context manager: files stay mapped until it ends.

    `bytes_read`: so far, of the files. `num_skipped`: tensors of the files that no name leads to.

    Raises:
        RuntimeFailure: CheckpointInvalid, from the constructor (no or unreadable files) and from `read`.
    """

    num_skipped: int
    bytes_read: int

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return self.described(name) is not None

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """Of all tensors of the model's own files, also of those that nothing here reads."""

    @abstractmethod
    def path_of(self, name: str) -> Path:
        """The file of one of `names`."""

    @abstractmethod
    def described(self, name: str) -> DescribedTensor | None:
        """One tensor; None where there is none."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in the dtype described; the data may be the mapped file: copy before changing it."""

    @abstractmethod
    def read_cut(self, name: str, ranges: Sequence[tuple[range, ...]]) -> Tensor:
        """Of one tensor only `ranges`, for each dimension those that are kept, one after another; no other byte."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files."""

    def check(
        self,
        expected: Iterable[tuple[str, tuple[int, ...]]],
        dtypes: Mapping[str, tuple[str, ...]] | None = None,
        optional: Container[str] = (),
        squeezable: Container[str] = (),
        documents: Container[str] = (),
    ) -> None:
        """Refuse the checkpoint unless every expected tensor exists with this shape and one of its types.

        Args:
            dtypes: by tensor, as safetensors names them; by default a float type.
            optional: tensors that may be absent.
            squeezable: tensors whose dimensions of size one do not count.
            documents: tensors that hold text, of any length up to `DOCUMENT_LIMIT_BYTES`.
        """
        for name, shape in expected:
            stored = self.described(name)
            if stored is None and name in optional:
                continue
            if stored is None:
                hint = self._packed_instead(name)
                raise _invalid(f"{self._folder}: tensor {name} {list(shape)} is missing from the checkpoint{hint}.")
            allowed = (dtypes or {}).get(name, tuple(FLOAT_DTYPES))
            found = stored.shape
            if name in documents and len(found) == 1:
                shape = (min(found[0], DOCUMENT_LIMIT_BYTES),)
            if found != shape and not (name in squeezable and _squeezed(found) == _squeezed(shape)):
                packed = " by its sizes and its quantization_config" if not {*allowed} <= FLOAT_DTYPES.keys() else ""
                raise _invalid(
                    f"{stored.path}: tensor {name} has shape {list(found)}; config.json asks for {list(shape)}{packed}."
                )
            if stored.dtype not in allowed:
                raise _invalid(
                    f"{stored.path}: tensor {name} is {stored.dtype}; it must be one of {', '.join(allowed)}."
                )

    def _packed_instead(self, name: str) -> str:
        """Of a weight that is missing: that a packed one is there, as the end of a sentence; else empty."""
        module = name.removesuffix(".weight")
        packed = next((one for end in PACKED_NAMES if self.described(one := f"{module}.{end}") is not None), None)
        if packed is None or module == name:
            return ""
        return (
            f"; it has {packed}, but quantization_config of config.json does not say how that is packed: take it over "
            "from quantize_config.json, where older tools wrote it, or correct its list of modules kept in 16 bit"
        )

    def label(self, name: str) -> str:
        """A tensor as messages name it: with its file, since a draft has tensors of the same names as its target."""
        stored = self.described(name)
        return name if stored is None else f"{name} of {stored.path}"

    def element_bytes(self, name: str) -> int:
        """Of one tensor that `check` has passed."""
        stored = self.described(name)
        assert stored is not None  # noqa: S101 - checked
        return DTYPE_BYTES[stored.dtype]

    def read_document(self, name: str) -> bytes:
        """The bytes of one tensor that `check` has passed; they do not count as read."""
        done = self.bytes_read
        text = bytes(self.read(name).tolist())
        self.bytes_read = done
        return text


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _invalid(message: str) -> RuntimeFailure:
    return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message)
