"""Safetensors folder -> tensors, each checked before a byte of it is used.

Files are memory-mapped: a tensor costs memory only where it is copied to.
Safetensors only: a pickle can run code, so `*.bin` and `*.pt` are refused by name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.loading.tensor_store import DescribedTensor, TensorStore
from millstream_runtime.rust_panics import RustPanic, panics_as_errors
from millstream_runtime.sources.safetensors_header import LFS_POINTER
from millstream_runtime.sources.selection import NO_INDEX

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
LANGUAGE_MODEL_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."))
TOWER_PREFIX = "visual."  # where the language model has the names of a model without a tower
HEAD_NAME, EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"
CHECKED_AT_ONCE = 1 << 20  # numbers


class Checkpoint(TensorStore):
    """A folder of safetensors. `read` gives the mapped file itself.

    Of a model with a vision tower it has the language model, by the names of a model without one; it skips the rest.
    """

    def __init__(self, folder: Path, names: Callable[[Iterable[str]], dict[str, str]] | None = None) -> None:
        """`names`: of the tensors here, to those in the files, which it gets; `names_of_language_model` by default."""
        super().__init__(folder)
        self._files = {path: _open(path) for path in safetensors_files(folder)}
        stored = file_of_each({path: file.keys() for path, file in self._files.items()})
        self._stored_name = (names or names_of_language_model)(stored)
        self._file_of = {name: stored[stored_name] for name, stored_name in self._stored_name.items()}
        self.num_skipped = len(stored) - len(self._file_of)
        self.bytes_read = 0

    def close(self) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    @property
    def names(self) -> frozenset[str]:
        """Next to a `model.safetensors` that no index names, other files are no part of the model for any loader."""
        single = self._folder / SINGLE_NAME
        is_single = single in self._files
        return frozenset(name for name, path in self._file_of.items() if path == single or not is_single)

    def path_of(self, name: str) -> Path:
        return self._file_of[name]

    def described(self, name: str) -> DescribedTensor | None:
        path = self._file_of.get(name)
        if path is None:
            return None
        view = self._slice(name)
        return DescribedTensor(path, tuple(view.get_shape()), view.get_dtype())

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
            with panics_as_errors:
                tensor = read(self._files[path])
        except (SafetensorError, OSError, RustPanic) as error:
            raise _invalid(f"{path}: tensor {name} cannot be read: {_reason(error)}.") from error
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor


def names_of_language_model(stored: Iterable[str]) -> dict[str, str]:
    """Names as in a model without a vision tower, to those in the files. Where there is no tower they are the same.

    language_model.model.layers.0...    language_model.lm_head.weight    as published
    model.language_model.layers.0...    lm_head.weight                   as transformers writes it since 4.52
    model.layers.0...                   lm_head.weight                   Qwen2-VL's, beside visual.*
    """
    names = {name: name for name in stored}
    for prefix, plain in LANGUAGE_MODEL_PREFIXES:
        if any(name.startswith(f"{prefix}layers.") for name in names):
            heads = {name.removeprefix("language_model."): name for name in names if name.endswith(HEAD_NAME)}
            return heads | {plain + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return {name: name for name in names if not name.startswith(TOWER_PREFIX)}


def names_of_tied_model(stored: Iterable[str]) -> dict[str, str]:
    """The same of a model whose head is its embedding: where files hold it as the head alone, it is the embedding.

    transformers 5 loads either name into the one tensor.
    """
    names = names_of_language_model(stored)
    if EMBEDDING_NAME not in names and HEAD_NAME in names:
        names[EMBEDDING_NAME] = names.pop(HEAD_NAME)
    return names


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse weights with NaN or infinity: every answer would be noise."""
    flag = bad_numbers(tensor)
    if flag is not None and bool(flag):
        raise invalid_numbers(name, tensor.dtype)


def bad_numbers(tensor: Tensor) -> Tensor | None:
    """Whether `tensor` holds NaN or infinity, as one bool on its device, without waiting; None: its type has none."""
    if not tensor.dtype.is_floating_point:
        return None
    if tensor.dtype == torch.float8_e4m3fn:  # it has no infinity, and torch does not add such numbers
        return (tensor.view(torch.uint8) & 0x7F == 0x7F).any()
    if tensor.is_cpu and tensor.numel() > CHECKED_AT_ONCE and tensor.dim() > 1:
        # torch makes all of it float32 first, which for a large table would be twice the memory that it takes.
        rows = max(1, CHECKED_AT_ONCE * len(tensor) // tensor.numel())
        return ~torch.isfinite(torch.stack([part.sum(dtype=torch.float32) for part in torch.split(tensor, rows)])).all()
    return ~torch.isfinite(tensor.sum(dtype=torch.float32))


def invalid_numbers(name: str, dtype: torch.dtype) -> RuntimeFailure:
    """Return the failure for a tensor with such numbers."""
    kind = "NaN" if dtype == torch.float8_e4m3fn else "NaN or infinite"
    return _invalid(f"Tensor {name} holds {kind} values; the checkpoint is damaged.")


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


def file_of_each(names_in: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """Return the file of each tensor, of the names in each file. `model.safetensors` goes before others, as for most
    loaders.

    Raises:
        RuntimeFailure: CheckpointInvalid, two other files have a tensor of one name: they are of two models.
    """
    found: dict[str, Path] = {}
    for path in sorted(names_in, key=lambda path: path.name != SINGLE_NAME):
        for name in names_in[path]:
            first = found.setdefault(name, path)
            if first is not path and first.name != SINGLE_NAME:
                raise _invalid(
                    f"{path}: tensor {name:.200} is in {first.name}, too; remove the file that is not meant."
                )
    return found


def _indexed_files(index: Path) -> list[Path]:
    """The shard files that the index names; each must lie directly in the model folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except OSError as error:
        raise _invalid(f"{index} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _invalid(f"{index} {NO_INDEX}.") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise _invalid(f"{index} names {name!r}; a shard must be a *.safetensors file next to the index.")
        if not is_file(index.parent / name):
            raise _invalid(f"{index.parent / name} is named by {INDEX_NAME} but does not exist; fetch the shard again.")
    return sorted(index.parent / name for name in names)


def is_file(path: Path) -> bool:
    """Whether it is a regular file, or a link to one. No file system has one whose name is too long for it."""
    try:
        return path.is_file()
    except OSError:
        return False


def _open(path: Path) -> Any:
    if not is_file(path):  # to open a pipe would wait for ever
        raise _invalid(f"{path} is no file, or a link to none; fetch it again, or remove it.")
    try:
        with panics_as_errors:
            return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, RustPanic) as error:
        if _is_pointer(path):
            raise _invalid(f"{path} is a git-lfs pointer, not the weights; fetch it with LFS.") from None
        size_bytes = path.stat().st_size if path.exists() else 0
        raise _invalid(
            f"{path} ({size_bytes} bytes) is truncated or corrupt: {_reason(error)}; fetch or build the file again."
        ) from error


def _reason(error: Exception) -> str:
    return error.detail if isinstance(error, RustPanic) else str(error)


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def _invalid(message: str) -> RuntimeFailure:
    return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message)
