"""A model in GGUF files: one, or all parts of a split one, read as a folder of Hugging Face would be.

    folder/model-Q4_K_M.gguf                              one file
    folder/model-00001-of-00003.gguf  …                   parts; the first has the metadata

A folder with *.safetensors is never read this way. Files of vision towers (`mmproj-F16.gguf`, `model-mmproj.gguf`) and
importance matrices (`model-imatrix.gguf`) are left out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.config_values import config_values
from millstream_runtime.gguf.header import GgufHeader, GgufTensor, invalid_gguf, read_gguf_file
from millstream_runtime.gguf.tensor_names import hugging_face_name

_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")
VISION_PREFIX = "mmproj"
# Also the suffix of a model that was quantized with a matrix: alone in its place, such a file is the model.
_COMPANION = re.compile(r"(?<![A-Za-z0-9])(mmproj|imatrix)(?![A-Za-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoredGgufTensor:
    """A tensor, and the file that holds it."""

    path: Path
    tensor: GgufTensor


@dataclass(frozen=True, slots=True)
class GgufModel:
    """`tensors`: by their names in a Hugging Face checkpoint. `unnamed`: those without one, and their files."""

    path: Path  # the first file
    header: GgufHeader  # its header, with the metadata
    tensors: dict[str, StoredGgufTensor]
    unnamed: dict[str, Path]

    @property
    def architecture(self) -> str:
        return str(self.header.metadata.get("general.architecture", ""))[:60]

    def config(self, *, is_header_alone: bool = False) -> dict[str, Any]:
        """The fields of a config.json. `is_header_alone`: the file is elsewhere, and no tensor of it can be read.

        Raises:
            RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming the field of the metadata.
        """
        described = {name: one.tensor for name, one in self.tensors.items()}
        factors = [] if is_header_alone else self._rope_factors()
        return config_values(self.header.metadata, described, self.header.where, factors)

    def _rope_factors(self) -> list[float]:
        """By which Llama 3 divides the frequencies of its pairs; a small tensor, and no field."""
        found = self.header.tensors.get("rope_freqs.weight")
        if found is None:
            return []
        if found.type.name != "F32" or len(found.shape) != 1 or found.num_elements > 1 << 12:
            raise invalid_gguf(self.header.where, f"has tensor {found.name} of another form than a list of F32")
        with self.path.open("rb") as file:
            file.seek(found.offset_bytes)
            data = file.read(found.num_bytes)
        return list(struct.unpack(f"<{found.num_elements}f", data))


def gguf_files_of(names: Collection[str], where: str) -> list[str]:
    """The files of the one GGUF model among the names of a folder's files; empty where there is none to be read.

    Raises:
        RuntimeFailure: CheckpointInvalid: several models, or a part is missing.
    """
    if _has_safetensors(names):
        return []
    found = gguf_model_names(names)
    models = {(match[1], match[3]) if (match := _PART.fullmatch(name)) else (name, "") for name in found}
    if len(models) > 1:
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"{where} holds {len(models)} GGUF models ({', '.join(found[:3])}{', …' if len(found) > 3 else ''}); give "
            "a folder or image with one of them, or name one of a repository as org/name:Q4_K_M.",
        )
    for stem, count in models:
        if count and found != (all_parts := [f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, int(count) + 1)]):
            missing = next((one for one in all_parts if one not in found), found[0])
            raise RuntimeFailure(
                FailureReason.CHECKPOINT_INVALID, f"{where} lacks {missing}, a part of {stem}; fetch all {count} parts."
            )
    return found


def gguf_files_left_out(names: Collection[str]) -> list[str]:
    """The GGUF files of a folder whose *.safetensors are read, and not they."""
    return gguf_model_names(names) if _has_safetensors(names) else []


def _has_safetensors(names: Collection[str]) -> bool:
    return any(name.endswith(".safetensors") and "/" not in name for name in names)


def gguf_model_names(names: Collection[str]) -> list[str]:
    """GGUF files of models: no vision towers, no importance matrices, and nothing in subfolders."""
    left_out = (VISION_PREFIX, ".")
    listed = sorted(name for name in names if name.endswith(".gguf") and "/" not in name)
    listed = [name for name in listed if not name.startswith(left_out)]
    return [name for name in listed if not _COMPANION.search(name)] or listed


def gguf_files_in(folder: Path) -> list[Path]:
    """As `gguf_files_of`, of a folder on disk."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    return [folder / name for name in gguf_files_of(names, str(folder))]


def read_gguf_folder(folder: Path) -> GgufModel | None:
    """The model of a folder, without its weights; None where it is none of GGUF.

    Raises:
        RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming file and field.
    """
    files = gguf_files_in(folder)
    return gguf_model({path: read_gguf_file(path) for path in files}) if files else None


def gguf_model(headers: Mapping[Path, GgufHeader]) -> GgufModel:
    """The model whose parts, the first one first, have these headers. Raises RuntimeFailure: CheckpointInvalid."""
    first = next(iter(headers))
    is_gemma = str(headers[first].metadata.get("general.architecture", "")).startswith("gemma")
    tensors: dict[str, StoredGgufTensor] = {}
    unnamed: dict[str, Path] = {}
    for path, header in headers.items():
        for tensor in header.tensors.values():
            name = hugging_face_name(tensor.name, is_gemma=is_gemma)
            if name is not None and name in tensors:
                raise invalid_gguf(str(path), f"has tensor {tensor.name}, which another part has too")
            if name is None:
                unnamed[tensor.name] = path
            else:
                tensors[name] = StoredGgufTensor(path, tensor)
    return GgufModel(first, headers[first], tensors, unnamed)
