"""Safetensors folder -> tensors, each checked before a byte of it is used.

The header of every file is read first: what is missing, misshapen, of the wrong type or cut off is named with its
file before any weight is loaded. Files are memory-mapped: a tensor costs memory only where it is copied to.
Safetensors only: a pickle can run code, so `*.bin` and `*.pt` are refused by name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millstream_runtime.errors import FailureReason, RuntimeFailure

INDEX_NAME = "model.safetensors.index.json"
LANGUAGE_MODEL_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."))
HEAD_NAME = "lm_head.weight"
FLOAT_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors' names, and bytes per element
DTYPE_BYTES = FLOAT_DTYPES | {"I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}


class Checkpoint:
    """The tensors of a model folder by name. Use as a context manager: files stay mapped until it ends.

    Of a model with a vision tower it has the language model, by the names of a model without one. `num_skipped`: how
    many tensors it leaves out for that.

    Raises:
        RuntimeFailure: CheckpointInvalid, from the constructor (no or unreadable files) and from `read`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {path: _open(path) for path in safetensors_files(folder)}
        stored: dict[str, Path] = {
            name: path
            for path, file in self._files.items()
            for name in file.keys()  # noqa: SIM118 - not a mapping
        }
        self._stored_name = names_of_language_model(stored)
        self._file_of = {name: stored[stored_name] for name, stored_name in self._stored_name.items()}
        self.num_skipped = len(stored) - len(self._file_of)
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.__exit__(kind, error, trace)
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def check(
        self,
        expected: Iterable[tuple[str, tuple[int, ...]]],
        dtypes: Mapping[str, tuple[str, ...]] | None = None,
        optional: Container[str] = (),
        squeezable: Container[str] = (),
    ) -> None:
        """Refuse the checkpoint unless every expected tensor exists with this shape and one of its types.

        Args:
            dtypes: by tensor, as safetensors names them; by default a float type.
            optional: tensors that may be absent.
            squeezable: tensors whose dimensions of size one do not count.
        """
        for name, shape in expected:
            path = self._file_of.get(name)
            if path is None and name in optional:
                continue
            if path is None:
                raise _invalid(f"{self._folder}: tensor {name} {list(shape)} is missing from the checkpoint.")
            view = self._slice(name)
            allowed = (dtypes or {}).get(name, tuple(FLOAT_DTYPES))
            found = tuple(view.get_shape())
            if found != shape and not (name in squeezable and _squeezed(found) == _squeezed(shape)):
                packed = " by its sizes and its quantization_config" if not {*allowed} <= FLOAT_DTYPES.keys() else ""
                raise _invalid(
                    f"{path}: tensor {name} has shape {list(view.get_shape())}; config.json asks for "
                    f"{list(shape)}{packed}."
                )
            if view.get_dtype() not in allowed:
                raise _invalid(f"{path}: tensor {name} is {view.get_dtype()}; it must be one of {', '.join(allowed)}.")

    def element_bytes(self, name: str) -> int:
        """Of one tensor that `check` has passed."""
        return DTYPE_BYTES[self._slice(name).get_dtype()]

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in the file's own dtype; the data is the mapped file, so copy before changing it."""
        return self._counted(name, lambda file: file.get_tensor(self._stored_name[name]))

    def read_cut(self, name: str, ranges: Sequence[tuple[range, ...]]) -> Tensor:
        """Of one tensor only `ranges`, for each dimension those that are kept, one after another; no other byte."""
        return self._counted(name, lambda file: _cut(file.get_slice(self._stored_name[name]), ranges))

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored_name[name])

    def _counted(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        path = self._file_of[name]
        try:
            tensor = read(self._files[path])
        except (SafetensorError, OSError) as error:
            raise _invalid(f"{path}: tensor {name} cannot be read: {error}.") from error
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor


def names_of_language_model(stored: Iterable[str]) -> dict[str, str]:
    """Names as in a model without a vision tower, to those in the files. Where there is no tower they are the same.

    language_model.model.layers.0...    language_model.lm_head.weight    as published
    model.language_model.layers.0...    lm_head.weight                   as transformers writes it since 4.52
    """
    names = {name: name for name in stored}
    for prefix, plain in LANGUAGE_MODEL_PREFIXES:
        if any(name.startswith(f"{prefix}layers.") for name in names):
            heads = {name.removeprefix("language_model."): name for name in names if name.endswith(HEAD_NAME)}
            return heads | {plain + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return names


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse weights with NaN or infinity: every answer would be noise."""
    if not tensor.dtype.is_floating_point:
        return
    if tensor.dtype == torch.float8_e4m3fn:  # it has no infinity, and torch does not add such numbers
        if bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise _invalid(f"Tensor {name} holds NaN values; the checkpoint is damaged.")
        return
    if not torch.isfinite(tensor.sum(dtype=torch.float32)):
        raise _invalid(f"Tensor {name} holds NaN or infinite values; the checkpoint is damaged.")


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _cut(view: Any, ranges: Sequence[tuple[range, ...]]) -> Tensor:
    """`view`: safetensors' own lazy slice."""
    parts: list[Tensor] = [
        view[tuple(slice(one.start, one.stop) for one in place)] for place in itertools.product(*ranges)
    ]
    if len(parts) == 1:
        return parts[0].contiguous()
    (dimension,) = (index for index, kept in enumerate(ranges) if len(kept) > 1)  # nothing is fused in two dimensions
    if parts[0].dtype == torch.float8_e4m3fn:
        return torch.cat([part.view(torch.uint8) for part in parts], dim=dimension).view(parts[0].dtype)
    return torch.cat(parts, dim=dimension)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files that hold a model's weights. Raises RuntimeFailure: CheckpointInvalid, there are none."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise _invalid(
            f"{folder} has only pickled weights ({pickles[0]}), which can run code; convert them to safetensors."
        )
    raise _invalid(f"{folder} has no *.safetensors file.")


def _indexed_files(index: Path) -> list[Path]:
    """The shard files that the index names; each must lie directly in the model folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _invalid(f"{index} is not a readable safetensors index: {error!r}.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise _invalid(f"{index} names {name!r}; a shard must be a *.safetensors file next to the index.")
        if not (index.parent / name).is_file():
            raise _invalid(f"{index.parent / name} is named by {INDEX_NAME} but does not exist; fetch the shard again.")
    return sorted(index.parent / name for name in names)


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        size_bytes = path.stat().st_size if path.exists() else 0
        raise _invalid(
            f"{path} ({size_bytes} bytes) is truncated or corrupt: {error}; fetch or build the file again."
        ) from error


def _invalid(message: str) -> RuntimeFailure:
    return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message)
